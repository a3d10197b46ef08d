"""Compare models retrained without a list, or on it, with those of random samples."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    PROOF,
    RETRAINED,
    SCORES,
    check_retrained,
    check_same,
    create,
    open_artifact,
)
from trak_core.evaluation.retrained_lists import CONFIDENCE, measures, proof_tables
from trak_core.model_outputs.table import about_output
from trak_core.spec import RetrainedSpec
from trak_core.system.progress import software


def prove_list(
    *,
    proof: Path,
    scores: Path,
    retrained: Sequence[Path],
    spec: RetrainedSpec,
    kind: str,
    code: str,
) -> None:
    """Write accuracy, loss and model output against the number of samples removed, or kept.

    ``retrained`` has a file a draw, made for ``spec``; ``scores`` are those of the experiment whose
    targets count, for their labels. ``docs/reference/evaluation-files.md`` describes the tables.
    """
    with open_artifact(scores, SCORES) as file:
        targets, scores_hash = file.table("targets"), file.content_hash
        experiment = file.spec["experiment"]
    made_by = replace(RETRAINED, rule="retrain_list")
    outputs, predictions, hashes, sizes = [], [], [], []
    for draw, path in enumerate(retrained):
        with open_artifact(path, made_by) as file:
            check_retrained(file, spec, made_by.rule, list=kind, draw=draw)
            sizes.append(file.spec["sizes"])
            check_same("number of samples", sizes[0], sizes[-1], path, made_by.rule)
            row = {target: i for i, target in enumerate(file.columns("outputs"))}
            columns = [row[target] for target in targets["id"]]
            outputs.append(file.matrix("outputs")[:][:, columns])
            predictions.append(file.matrix("predictions")[:][:, columns])
            hashes.append(file.content_hash)
    values = measures(
        about_output(spec.model_output),
        np.stack(outputs),
        np.stack(predictions),
        targets["label"].to_numpy(),
    )
    summary, models = proof_tables(values, sizes[0])
    file_spec = spec.as_dict() | {
        "list": kind,
        "experiment": experiment,
        "scores": scores_hash,
        "retrained": hashes,
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
