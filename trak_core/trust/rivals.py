"""Subset sums of everything that the scores are measured beside: other settings, and baselines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import (
    EMBEDDINGS,
    FEATURES,
    NORMAL_MATRIX,
    Artifact,
    check_made_for,
    check_same,
    check_splits,
    open_artifact,
)
from trak_core.scoring.scores import powered
from trak_core.scoring.solve import normal_matrix
from trak_core.spec import Combine
from trak_core.trust.subset_sums import damped_sums, trak_sums, weighted_sums

_TRACIN = (1.0, Combine.AVERAGE_OF_PRODUCTS)
_TRAK = (1.0, Combine.PRODUCT_OF_AVERAGES)
# Of the random baseline.
_SEED = 0
# A row of the summary: method, kind, proj_dim (0 where there is none).
Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way from features to scores; see the spec of the scores."""

    damping: float
    loss_weight_power: float
    combine: str
    proj_dim: int


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Subset sums, each of shape (S, m).

    Attributes:
        methods: By name, kind and proj_dim (0 where there is none).
        swept: By setting.
    """

    methods: dict[Key, np.ndarray]
    swept: dict[Setting, np.ndarray]


def simple_sums(
    names: Sequence[str], masks: np.ndarray, scored: Artifact, block: int
) -> dict[Key, np.ndarray]:
    """Return the sums of the baselines that need no gradients.

    Args:
        names: ``random``: normal numbers; ``same_class``: 1 for training samples of the target's
            label, else 0. Others are passed over.
        masks: Shape (S, n), float64.
        scored: Any checkpoint's scores, for the labels.
        block: Training samples at once.
    """
    labels, own = scored.vector("train_labels"), scored.vector("target_labels")
    rng = np.random.default_rng(_SEED)
    found = {name: np.zeros((len(masks), len(own))) for name in ("random", "same_class")}
    for start in range(0, len(labels), block):
        rows = labels[start : start + block]
        part = masks[:, start : start + block]
        found["random"] += part @ rng.standard_normal((len(rows), len(own)))
        found["same_class"] += part @ (rows[:, None] == own)
    return {(name, "baseline", 0): found[name] for name in names if name in found}


def cosine_sums(
    paths: Sequence[Path],
    masks: np.ndarray,
    train_ids: list[Any],
    target_ids: list[Any],
    expected: dict[str, Any],
    block: int,
) -> np.ndarray:
    """Return the sums of cosines between embeddings, averaged over checkpoints.

    Args:
        paths: One file of embeddings a checkpoint.
        masks: Shape (S, n), float64.
        train_ids: Ids of the training samples.
        target_ids: Ids of the targets.
        expected: See ``check_made_for``; with checkpoints: their ids, in order.
        block: Training samples at once.
    """
    settings = {key: value for key, value in expected.items() if key != "checkpoints"}
    total = np.zeros((len(masks), len(target_ids)))
    for path, checkpoint in zip(paths, expected["checkpoints"], strict=True):
        with open_artifact(path, EMBEDDINGS) as file:
            check_made_for(file, {**settings, "checkpoint": checkpoint}, EMBEDDINGS.rule)
            check_same("training samples", train_ids, file.index("train"), path, EMBEDDINGS.rule)
            row = {target: i for i, target in enumerate(file.index("targets"))}
            there = [target for target in target_ids if target in row]
            check_same("targets", target_ids, there, path, EMBEDDINGS.rule)
            train, pool = file.matrix("train"), file.matrix("targets")
            sums = np.zeros((len(masks), train.shape[1]))
            for start in range(0, len(train_ids), block):
                part = slice(start, start + block)
                sums += masks[:, part] @ _unit(train[part])
            # HDF5 reads rows in their own order.
            rows, place = np.unique([row[i] for i in target_ids], return_inverse=True)
            own = _unit(pool[rows])[place]
        total += sums @ own.T
    return total / len(paths)


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, sizes, out=np.zeros_like(rows), where=sizes > 0)


def _grid(sweep: Mapping[str, Sequence[Any]], own: Setting) -> list[Setting]:
    values = [
        sorted({*sweep.get(key, ()), getattr(own, key)})
        for key in ("damping", "loss_weight_power", "combine", "proj_dim")
    ]
    return [Setting(*each) for each in product(*values)]


def _check_files(
    train: Artifact,
    targets: Artifact,
    matrix: Artifact,
    scored: Artifact,
    expected: dict[str, Any],
    weighting: str,
) -> None:
    """Refuse features that a checkpoint's scores were not made of."""
    check_splits(train, targets, expected, FEATURES.rule)
    wanted = {"weighting": weighting, "features": train.content_hash}
    found = {key: matrix.spec[key] for key in wanted}
    check_same("features", wanted, found, matrix.path, NORMAL_MATRIX.rule)
    made_of = scored.spec["train_features"]
    check_same("training features", made_of, train.content_hash, train.path, FEATURES.rule)
    ids = scored.ids("target_ids"), targets.ids("sample_ids")
    check_same("targets", *ids, targets.path, FEATURES.rule)


def feature_sums(
    files: Sequence[tuple[Path, Path, Path]],
    scored: Sequence[Artifact],
    masks: np.ndarray,
    *,
    expected: dict[str, Any],
    weighting: str,
    own: Setting,
    sweep: Mapping[str, Sequence[Any]] | None,
    trak: Sequence[int],
    gradient_dot: bool,
    block: int,
) -> Alternatives:
    """Return what comes straight from features: other settings, TRAK 0.3.2, gradient products.

    Args:
        files: Features of the training samples and of the targets, and the normal matrix, of each
            checkpoint.
        scored: Each checkpoint's scores.
        masks: Shape (S, n), float64.
        expected: See ``check_made_for``; its split is the experiment, and checkpoints are ids.
        weighting: Of the normal matrices.
        own: The study's own setting, always part of the grid.
        sweep: Values of each field of ``Setting``; None for no grid.
        trak: Dimensions for TRAK 0.3.2's formula.
        gradient_dot: Whether to sum inner products of gradients, weighted by Q.
        block: Training samples at once.
    """
    settings = {key: value for key, value in expected.items() if key != "checkpoints"}
    grid = _grid(sweep, own) if sweep is not None else []
    pairs = list(
        dict.fromkeys([*((s.loss_weight_power, Combine(s.combine)) for s in grid), _TRACIN, _TRAK])
    )
    methods = {("trak_0.3.2", "trak", dim): np.zeros(()) for dim in trak}
    if gradient_dot:
        methods["gradient_dot", "baseline", own.proj_dim] = np.zeros(())
    swept = {setting: np.zeros(()) for setting in grid}
    dampings = sorted({setting.damping for setting in grid})
    loss_weights = [part.vector("loss_weights") for part in scored]
    averages = {
        power: np.mean([powered(q, power) for q in loss_weights], axis=0)
        for power, combine in pairs
        if combine is Combine.PRODUCT_OF_AVERAGES
    }
    for c, ((train, targets, matrix), checkpoint) in enumerate(
        zip(files, expected["checkpoints"], strict=True)
    ):
        with (
            open_artifact(train, FEATURES) as train_file,
            open_artifact(targets, FEATURES) as target_file,
            open_artifact(matrix, NORMAL_MATRIX) as matrix_file,
        ):
            print(f"Checkpoint {checkpoint}", flush=True)
            of_checkpoint = {**settings, "checkpoint": checkpoint}
            _check_files(train_file, target_file, matrix_file, scored[c], of_checkpoint, weighting)
            weights = [
                averages[power]
                if combine is Combine.PRODUCT_OF_AVERAGES
                else powered(loss_weights[c], power)
                for power, combine in pairs
            ]
            sums = weighted_sums(masks, weights, _blocks(train_file, block))
            rows = target_file.matrix("features")[:].astype(np.float64)
            normal = matrix_file.matrix("normal_matrix")[:]
            plain = normal if weighting == "plain" else _plain_matrix(train_file, block)
        for dim in sorted({setting.proj_dim for setting in grid}):
            solved = damped_sums(
                sums[:, :, :dim], normal[:dim, :dim], masks.shape[1], rows[:, :dim], dampings
            )
            for s in grid:
                if s.proj_dim == dim:
                    pair = pairs.index((s.loss_weight_power, Combine(s.combine)))
                    swept[s] = swept[s] + solved[dampings.index(s.damping), pair]
        for name, kind, dim in methods:
            part = (
                trak_sums(sums[pairs.index(_TRAK), :, :dim], plain[:dim, :dim], rows[:, :dim])
                if kind == "trak"
                else sums[pairs.index(_TRACIN)] @ rows.T
            )
            methods[name, kind, dim] = methods[name, kind, dim] + part
    return Alternatives(methods, swept)


def _blocks(file: Artifact, block: int) -> Iterator[tuple[int, int, np.ndarray]]:
    values = file.matrix("features")
    for start in range(0, len(values), block):
        stop = min(start + block, len(values))
        yield start, stop, values[start:stop]


def _plain_matrix(file: Artifact, block: int) -> np.ndarray:
    """Return the normal matrix of weights 1, where the stored one is weighted by curvature."""
    return normal_matrix((rows, np.ones(len(rows))) for _, _, rows in _blocks(file, block))[0]
