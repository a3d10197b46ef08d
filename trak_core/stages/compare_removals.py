"""Compare models retrained without chosen samples, or on them, with those of random samples.

``compare_removals`` has a list for each target, the samples that help it most, and counts what that
does to the target's own output. ``prove_list`` has one list, and counts all targets' loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import PROOF, REMOVALS, SCORES, check_same, create, open_artifact, software
from trak_core.evaluation.intervals import CONFIDENCE, accuracy_interval, mean_interval
from trak_core.model_outputs.about_outputs import About, about_output
from trak_core.spec import RetrainedSpec, removed_sizes
from trak_core.stages._shared import Retrained, embeddings_hashes
from trak_core.study.retraining_draws import random_removals, top_removals
from trak_core.system.files import file_digest

# How rows begin that compare the scores with a baseline; its name follows.
LESS = "top less "
# What a measure of models can be, the difference of accuracies too.
_BOUNDS = {"accuracy": (0.0, 1.0), "target_loss": (0.0, np.inf), "accuracy less": (-1.0, 1.0)}


def compare_removals(
    *,
    removals: Path,
    scores: Path,
    random: Path,
    top: Sequence[Path],
    bm25: Sequence[Path] = (),
    embedding_cosine: Sequence[Path] = (),
    embeddings: Sequence[Path] = (),
    groups: Sequence[Sequence[Any]],
    spec: RetrainedSpec,
    digest: str | None = None,
    code: str,
) -> None:
    """Put models without some samples beside those of the same seed that saw everything.

    ``random`` are models trained on everything and without random samples; ``top`` those without
    the samples that ``scores`` call most helpful for a group of targets, a file for each of
    ``groups``; ``bm25`` and ``embedding_cosine`` likewise without those that this baseline names,
    none where it isn't asked for; ``digest`` is that of the study's texts, for ``bm25``, and
    ``embeddings`` are the files that ``embedding_cosine`` must be made of. Except for its draws
    ``spec`` decides all kinds.
    ``docs/reference/evaluation-files.md`` describes the tables.
    """
    target_ids = [target for group in groups for target in group]
    with open_artifact(scores, SCORES) as file:
        scores_hash, n_train = file.content_hash, len(file.index("scores"))
    n_removed = removed_sizes(spec.n_removed, n_train)
    files = [Retrained.read(random, target_ids, spec, "retrain_without_random")]
    outputs, predictions = _by_subset(files[0], spec.seeds)
    sizes = [0, *(size for size, _ in random_removals(n_removed, spec.draws))]
    chosen = {size: np.equal(sizes, size) for size in n_removed}
    chance = {size: (outputs[rows], predictions[rows]) for size, rows in chosen.items()}
    top_spec = replace(spec, subsets="top removals", draws=0)

    def without(
        paths: Sequence[Path], spec: RetrainedSpec, rule: str, **about: Any
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return outputs and predictions, (1, seeds, m), without each target's own, by number."""
        parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {n: [] for n in n_removed}
        for path, group in zip(paths, groups, strict=True):
            files.append(Retrained.read(path, group, spec, rule, targets=list(group), **about))
            own = _by_subset(files[-1], spec.seeds)
            for i, (target, size) in enumerate(top_removals(group, n_removed)):
                j = list(group).index(target)
                parts[size].append((own[0][[i], :, j], own[1][[i], :, j]))
        return {
            size: (np.stack([f for f, _ in own], axis=2), np.stack([y for _, y in own], axis=2))
            for size, own in parts.items()
        }

    by_scores = without(top, top_spec, "retrain_without_top", scores=scores_hash)
    made_of = {
        "bm25": {"digest": digest},
        "embedding_cosine": {"embeddings": embeddings_hashes(embeddings)},
    }
    baselines = {
        name: without(
            paths,
            replace(top_spec, subsets=f"top by {name}"),
            "retrain_without_baseline",
            **made_of[name],
        )
        for name, paths in (("bm25", bm25), ("embedding_cosine", embedding_cosine))
        if paths
    }
    everything = outputs[0], predictions[0]
    summary, table = removal_tables(by_scores, chance, everything, target_ids, baselines)
    provenance = software(code, "cpu", "numpy", "pandas")
    file_spec = {"scores": scores_hash, "retrained": [models.file.content_hash for models in files]}
    file_spec = spec.as_dict() | file_spec
    with create(removals, REMOVALS, file_spec, provenance, confidence=CONFIDENCE) as writer:
        writer.table("summary", summary, [])
        writer.table("targets", table, ["target_id"])
    print(summary.to_string(index=False))


def _by_subset(models: Retrained, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and predictions, (subsets, seeds, m)."""
    m = models.outputs.shape[1]
    return models.outputs.reshape(-1, seeds, m), models.predictions.reshape(-1, seeds, m)


def prove_list(
    *,
    proof: Path,
    scores: Path,
    retrained: Sequence[Path],
    listed: Path,
    spec: RetrainedSpec,
    kind: str,
    code: str,
) -> None:
    """Write accuracy, loss and model output against the number of samples removed, or kept.

    ``retrained`` has a file a draw, made for ``spec`` and the list in ``listed``; ``scores`` are
    those of the experiment whose targets count, for their labels.
    ``docs/reference/evaluation-files.md`` describes the tables.
    """
    with open_artifact(scores, SCORES) as file:
        targets, scores_hash = file.table("targets"), file.content_hash
        experiment = file.spec["experiment"]
    about = {"list": kind, "listed": file_digest(listed)}
    files = [
        Retrained.read(path, targets["id"].tolist(), spec, "retrain_list", draw=draw, **about)
        for draw, path in enumerate(retrained)
    ]
    sizes = files[0].file.spec["sizes"]
    for models in files:
        check_same("number of samples", sizes, models.file.spec["sizes"], models.file)
    values = measures(
        about_output(spec.model_output),
        np.stack([file.outputs for file in files]),
        np.stack([file.predictions for file in files]),
        targets["label"].to_numpy(),
    )
    summary, models = proof_tables(values, sizes)
    file_spec = spec.as_dict() | {
        "list": kind,
        "experiment": experiment,
        "scores": scores_hash,
        "retrained": [models.file.content_hash for models in files],
    }
    provenance = software(code, "cpu", "numpy", "pandas")
    with create(
        proof,
        PROOF,
        file_spec,
        provenance,
        confidence=CONFIDENCE,
        n_draws=len(retrained),
        n_targets=len(targets),
    ) as writer:
        writer.table("summary", summary, ["measure", "subset", "n"])
        writer.table("models", models, ["measure", "subset", "n", "draw"])
    print(summary.to_string(index=False))


def measures(
    about: About, outputs: np.ndarray, predictions: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return what models make of targets, one number a model and target, float64.

    ``output`` is f. For classes there are ``accuracy``, 1 where the prediction is the label, and
    ``target_loss``, -log p of the label, which is log(1 + exp(-f)); in a regression that is half
    the squared error. Other model outputs have no loss that follows from f. Outputs and predictions
    have shape (models, m), the targets' labels (m,).
    """
    f = outputs.astype(np.float64)
    if about.labels_are_classes:
        right = (predictions == labels).astype(np.float64)
        return {"accuracy": right, "target_loss": np.logaddexp(0, -f), "output": f}
    if about.weighs_by_curvature:  # and no classes: a regression
        return {"target_loss": (labels - f) ** 2 / 2, "output": f}
    return {"output": f}


def against_random(
    own: Mapping[int, np.ndarray], random: Mapping[int, np.ndarray], name: str
) -> dict[tuple[str, int], np.ndarray]:
    """Return numbers of models without (or on) samples beside those of random ones, by size.

    The keys are ``name`` or ``random`` or ``difference`` (own less random), and the size. Entries
    that are subtracted belong to models of one seed, so that what a seed does cancels.
    """
    less = {size: own[size] - random[size] for size in own}
    subsets = {name: own, "random": random, "difference": less}
    return {(subset, size): of[size] for subset, of in subsets.items() for size in of}


def proof_tables(
    values: Mapping[str, np.ndarray], sizes: list[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary``, of means over draws and targets, and ``models``, over targets.

    The values of each measure have shape (draws, 1 + 2 S, m): those of models that saw everything,
    of those without (or on) the list's first samples, and of those without (or on) as many random
    ones, for each of S sizes.
    """
    rows, models, n = [], [], len(sizes)
    for measure, numbers in values.items():
        own = {size: numbers[:, 1 + i] for i, size in enumerate(sizes)}
        random = {size: numbers[:, 1 + n + i] for i, size in enumerate(sizes)}
        parts = {("everything", 0): numbers[:, 0]} | against_random(own, random, "list")
        for (subset, size), part in parts.items():
            of_part = accuracy_interval if measure == "accuracy" else mean_interval
            low, high = of_part(part)
            bounds = f"{measure} less" if subset == "difference" else measure
            least, most = _BOUNDS.get(bounds, (-np.inf, np.inf))
            low, high = max(low, least), min(high, most)
            rows.append((measure, subset, size, float(part.mean()), low, high))
            if subset != "difference":
                means = enumerate(part.mean(axis=1).tolist())
                models += [(measure, subset, size, draw, mean) for draw, mean in means]
    return (
        pd.DataFrame(rows, columns=["measure", "subset", "n", "mean", "low", "high"]),
        pd.DataFrame(models, columns=["measure", "subset", "n", "draw", "mean"]),
    )


def removal_tables(
    top: Mapping[int, tuple[np.ndarray, np.ndarray]],
    random: Mapping[int, tuple[np.ndarray, np.ndarray]],
    everything: tuple[np.ndarray, np.ndarray],
    target_ids: Sequence[Any],
    baselines: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]] = MappingProxyType({}),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables ``summary`` and ``targets`` of removals of each target's own samples.

    An effect is ``change``, of f from the models that saw everything, and where predictions are
    classes ``flips``, the part of models that predict another. Models of one seed are compared.

    By the number removed there are outputs and predictions of models without each target's most
    helpful samples (``top``), shape (1, seeds, m), and without random ones, (draws, seeds, m);
    those of ``everything`` have (seeds, m). Baselines, by name, are like ``top``. Each has rows of
    its name, and of ``top less`` it.
    """

    def effects(models: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        outputs, predictions = models
        changes = {"change": (outputs.astype(np.float64) - everything[0]).mean(axis=0)}
        if predictions.dtype.kind != "f":
            changes["flips"] = (predictions != everything[1]).mean(axis=0)
        return changes

    own, chance = (
        {size: effects(of_size) for size, of_size in models.items()} for models in (top, random)
    )
    measured = {
        key: against_random(
            {size: own[size][key] for size in own}, {size: chance[size][key] for size in own}, "top"
        )
        for key in next(iter(own.values()))
    }
    for name, models in baselines.items():
        for size, of_size in models.items():
            for key, values in effects(of_size).items():
                measured[key][name, size] = values
                measured[key][f"{LESS}{name}", size] = own[size][key] - values
    rows, tables = [], []
    about = {"target_id": target_ids, "output": everything[0].mean(axis=0, dtype=np.float64)}
    for removed, size in measured["change"]:
        values = {key: of[removed, size] for key, of in measured.items()}
        low, high = mean_interval(values["change"])
        means = {key: float(value.mean()) for key, value in values.items()}
        of_size = {"removed": removed, "n_removed": size}
        rows.append(of_size | means | {"low": low, "high": high})
        if removed != "difference" and not removed.startswith(LESS):
            by_target = {key: value.mean(axis=0) for key, value in values.items()}
            tables.append(pd.DataFrame(of_size | about | by_target))
    return pd.DataFrame(rows), pd.concat(tables, ignore_index=True)
