"""Compare models retrained without a list, or on it, with those of random samples."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trak_core.artifacts import PROOF, SCORES, check_same, create, open_artifact
from trak_core.evaluation.retrained_lists import CONFIDENCE, measures, proof_tables
from trak_core.model_outputs.table import about_output
from trak_core.spec import RetrainedSpec
from trak_core.stages._inputs import Retrained
from trak_core.system.files import file_digest
from trak_core.system.progress import software


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
    sizes = files[0].spec["sizes"]
    for file, path in zip(files, retrained, strict=True):
        check_same("number of samples", sizes, file.spec["sizes"], path, "retrain_list")
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
        "retrained": [file.content_hash for file in files],
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
