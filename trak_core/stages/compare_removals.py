"""Compare models retrained without chosen samples, or on them, with those of random samples.

``compare_removals`` has a list for each target, the samples that help it most, and counts what that
does to the target's own output. ``prove_list`` has one list, and counts all targets' loss.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import PROOF, REMOVALS, SCORES, check_same, create, open_artifact, software
from trak_core.evaluation.retraining_effects import measures, proof_tables, removal_tables
from trak_core.model_outputs.table import about_output
from trak_core.scoring.intervals import CONFIDENCE
from trak_core.spec import RetrainedSpec, removed_sizes
from trak_core.stages._shared import Retrained, embeddings_hashes
from trak_core.study.retraining_draws import random_removals, top_removals
from trak_core.system.files import file_digest


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
