"""Average the checkpoints of an experiment into its scores."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EXACT_SCORES,
    FEATURES,
    SCORES,
    Artifact,
    check_together,
    create,
    open_artifact,
)
from trak_core.config.memory_needs import average_need
from trak_core.model_outputs.table import about_output
from trak_core.scoring.scores import (
    Extremes,
    harmed_class,
    help_and_harm,
    largest,
    most_frequent,
    unit_of,
)
from trak_core.spec import EXACT, MEAN_OF, TRAIN, ScoresSpec
from trak_core.stages._inputs import score_rows, similarity_rows
from trak_core.system.progress import blocks_with_progress, software

Summary = Callable[[np.ndarray], np.ndarray]


def _mean(numbers: np.ndarray) -> np.ndarray:
    return numbers.mean(axis=0, dtype=np.float64).astype(np.float32)


def _sd(numbers: np.ndarray) -> np.ndarray:
    return numbers.std(axis=0, dtype=np.float64).astype(np.float32)


def _by_blocks(
    parts: Sequence[Artifact], key: str, n_samples: int, block: int, *summaries: Summary
) -> list[np.ndarray]:
    """Return summaries over the checkpoints of what each says of every sample."""
    blocks: list[list[np.ndarray]] = [[] for _ in summaries]
    for start in range(0, n_samples, block):
        values = np.stack([part.vector(key, start, start + block) for part in parts])
        for summary, done in zip(summaries, blocks, strict=True):
            done.append(summary(values))
    return [np.concatenate(done) for done in blocks]


def _samples(parts: Sequence[Artifact], side: str, block: int) -> pd.DataFrame:
    """Return ids, labels and what checkpoints make of them: means, and the commonest class."""
    ids = parts[0].ids(f"{side}_ids")
    labels = parts[0].vector(f"{side}_labels")
    is_class = parts[0].vector(f"{side}_predictions", 0, 1).dtype.kind != "f"
    common = most_frequent if is_class else _mean
    (predictions,) = _by_blocks(parts, f"{side}_predictions", len(ids), block, common)
    outputs, spreads = _by_blocks(parts, f"{side}_outputs", len(ids), block, _mean, _sd)
    return pd.DataFrame({
        "id": ids,
        "label": labels,
        "prediction": predictions,
        "output": outputs,
        "output_sd": spreads,
    })


def _influences(
    helpful: Extremes, harmful: Extremes, train: pd.DataFrame, targets: pd.DataFrame
) -> pd.DataFrame:
    """Return each target's largest scores of either sign; ``harmful`` are of negated scores."""
    # (target, sign, rank): the order of the table.
    rows = np.stack([helpful.rows.T, harmful.rows.T], axis=1)
    sizes = np.stack([helpful.scores.T, harmful.scores.T], axis=1)
    kept = sizes > 0
    target, sign, rank = np.nonzero(kept)
    signs, train_rows = np.array([1, -1])[sign], rows[kept]
    return pd.DataFrame({
        "target_id": targets["id"].to_numpy()[target],
        "rank": rank + 1,
        "sign": signs,
        "train_id": train["id"].to_numpy()[train_rows],
        "train_label": train["label"].to_numpy()[train_rows],
        "score": (signs * sizes[kept]).astype(np.float32),
    })


def _own_columns(
    study_file: Path | None,
    question: Path | None,
    spec: ScoresSpec,
    key: str,
    ids: Sequence[int | str],
) -> pd.DataFrame:
    """Return what the study, or a file of targets, knows of the samples of a table."""
    is_train = key == "train"
    if (is_train or question is None or question.suffix == ".py") and study_file is None:
        return pd.DataFrame(index=range(len(ids)))
    # Only here, because it brings torch.
    from trak_core.study.columns import columns_of
    from trak_core.study.study import Study

    study = None if study_file is None else Study.load(study_file)
    name = TRAIN if is_train else str(spec.experiment)
    return columns_of(study, name, ids, None if is_train else question)


def average_scores(
    *,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    features: Sequence[Path],
    spec: ScoresSpec,
    defaults: str,
    columns: str,
    top: int,
    output_words: Mapping[str, str] | None = None,
    study_file: Path | None = None,
    question: Path | None = None,
    mean_of: str | None = None,
    code: str,
    memory_mb: int,
) -> None:
    """Combine A_c and loss weights over all checkpoints, block of rows by block of rows.

    There are scores for each checkpoint, and training features where only the solved targets were
    kept. ``top`` influences of either sign are kept for each target. Into the file come, in words,
    ``columns``: what labels and predictions are; ``defaults``: what the config left open; and
    ``output_words``: what it says of a model output of its own, None for one with a name here. A
    ``study_file``, and the experiment's own file of targets (``question``), bring columns.
    ``mean_of`` says in words what the one target is the mean of, None for targets out of data.
    """
    assert spec.loss_weight_power is not None
    with ExitStack() as stack:
        is_exact = spec.features.projection.get("kind") == EXACT
        kind = EXACT_SCORES if is_exact else CHECKPOINT_SCORES
        kind = kind if mean_of is None else replace(kind, rule="average_targets")
        parts = [stack.enter_context(open_artifact(path, kind)) for path in checkpoint_scores]
        phis = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        check_together(parts, spec, kind)
        rows = [
            similarity_rows(part, phi, normalize=spec.normalize)
            for part, phi in zip(parts, phis or [None] * len(parts), strict=True)
        ]
        n_train, n_targets = len(parts[0].vector("train_ids")), len(parts[0].vector("target_ids"))
        block = average_need(
            n_train=n_train,
            n_targets=n_targets,
            n_checkpoints=len(parts),
            top=top,
            solved_dim=spec.features.projection["proj_dim"] if phis else None,
        ).rows(memory_mb)
        # Early checkpoints count for the scores; what models say is what they say in the end.
        ends = [parts[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        train, targets = (_samples(ends, side, block) for side in ("train", "target"))
        (train["loss_weight"],) = _by_blocks(ends, "loss_weights", n_train, block, _mean)
        read_scores = score_rows(parts, rows, spec)
        file_spec = spec.as_dict() | {
            "projection": {k: v for k, v in parts[0].spec["projection"].items() if k != "stream"},
            "checkpoints": [part.spec["checkpoint"] for part in parts],
        }
        own_output = {} if output_words is None else {"model_output": json.dumps(output_words)}
        with create(
            scores,
            SCORES,
            file_spec,
            software(code, "cpu", "numpy", "pandas", made_from=[part.provenance for part in parts]),
            unit=unit_of(spec),
            sign=(
                "positive: the training sample pushes the target's model output up; scores of a "
                "subset add up to a prediction of how the output moves when trained on it"
            ),
            columns=columns,
            defaults=defaults or "none: the config says everything",
            n_checkpoints=len(parts),
            n_runs=len(ends),
            damping=float(spec.damping),
            weighting=spec.weighting,
            combine=str(spec.combine),
            loss_weight_power=float(spec.loss_weight_power),
            normalize=int(spec.normalize),
            **own_output,
        ) as writer:
            values = None
            if not phis:
                ids = train["id"].tolist(), targets["id"].tolist()
                values = writer.matrix("scores", *ids, chunks=(1024, 64))
            helpful = harmful = None
            sums, harmed = [], []
            has_classes = about_output(spec.features.model_output).labels_are_classes
            has_classes = has_classes and mean_of is None
            for start, stop in blocks_with_progress(n_train, block, "training samples"):
                mean = read_scores(start, stop).astype(np.float32)
                if values is not None:
                    values[start:stop] = mean
                sums.append(help_and_harm(mean))
                if has_classes:
                    harmed.append(harmed_class(mean, targets["label"].to_numpy()))
                helpful = largest(helpful, start, mean, top)
                harmful = largest(harmful, start, -mean, top)
            train["help"], train["harm"] = np.concatenate(sums).T.astype(np.float32)
            if harmed:
                train["harmed_label"] = np.concatenate(harmed)
            for key, table in (("targets", targets), ("train", train)):
                if key == "targets" and mean_of is not None:
                    own = pd.DataFrame({MEAN_OF: [mean_of]})
                else:
                    own = _own_columns(study_file, question, spec, key, table["id"].tolist())
                writer.table(key, table.join(own), ["id"])
            assert helpful is not None
            assert harmful is not None
            influences = _influences(helpful, harmful, train, targets)
            # Not `sign`: queries are numexpr's, to which that is a function, and find nothing.
            searchable = ["target_id", "rank", "train_id", "score"]
            writer.table("top_influences", influences, searchable)
