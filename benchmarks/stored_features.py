"""What float16 and int8 cost in scores, and save in bytes: a finished run's features, stored anew.

    snakemake scores --cores 2 --configfile config/config.yaml
    python benchmarks/stored_features.py results --experiment sample

The features of a run with `features_dtype: float32` are rounded as `compute_features` rounds them,
written as float32, float16 and int8, and scored by the stages `compute_normal_matrix`,
`compute_scores` and `average_scores`, all in one process with one thread, in turn. Prints for each
type the features' MiB, CPU seconds of writing and of the stages, rank correlations over the
training samples with float32's scores (their mean over targets, and the least), and how many of
a target's 20 most helpful samples are the same. Says nothing if float32's scores aren't the run's.
"""

import os

# Before numpy: libraries read it when they are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import argparse
import contextlib
import io
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from machine import environment

from trak_core.artifacts import FEATURES, SCORES, create, open_artifact
from trak_core.attribution.project_gradients import stored_rows
from trak_core.evaluation.lds import rank_correlations
from trak_core.queries.finished_run import FinishedRun
from trak_core.spec import ScoresSpec
from trak_core.system.job import stage_of

_TOP = 20
_VECTORS = ("sample_ids", "labels", "outputs", "predictions", "loss_weights", "curvature")


def store(source: Path, path: Path, dtype: str) -> None:
    """Write features that were stored as float32 in another type."""
    with open_artifact(source, FEATURES) as old:
        if old.spec["dtype"] != "float32":
            raise SystemExit(f"{source}: features must be float32")
        rows, ids = old.matrix("features")[:], old.ids("sample_ids")
        with create(path, FEATURES, old.spec | {"dtype": dtype}, old.provenance) as new:
            values = new.matrix("features", ids, range(rows.shape[1]), dtype=np.dtype(dtype))
            values[:] = stored_rows(rows, dtype, ids)
            for key in _VECTORS:
                if old.has(key):
                    new.vector(key, old.ids(key) if key == "sample_ids" else old.vector(key))


def score(folder: Path, spec: ScoresSpec) -> np.ndarray:
    """Score by the stages, from the features in a folder."""
    common, parts = {"code": "", "memory_mb": 1000}, []
    for name in spec.checkpoints:
        own, here = spec.under(name), folder / name
        matrix, part = here / "matrix.h5", here / "scores.h5"
        stage_of("compute_normal_matrix")(
            normal_matrix=matrix, features=here / "train.h5", spec=own.of_normal_matrix(), **common
        )
        stage_of("compute_scores")(
            scores=part,
            train_path=here / "train.h5",
            targets_path=here / "targets.h5",
            normal_matrix=matrix,
            spec=own,
            keep="full",
            **common,
        )
        parts.append(part)
    more = {"defaults": "", "columns": "", "top": _TOP, "features": []}
    final = folder / "scores.h5"
    stage_of("average_scores")(scores=final, checkpoint_scores=parts, spec=spec, **common, **more)
    with open_artifact(final, SCORES) as file:
        return file.matrix("scores")[:]


def main() -> None:
    """Store, score, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="of a finished run")
    parser.add_argument("--experiment", required=True)
    options = parser.parse_args()
    run = FinishedRun.of_folder(options.results)
    spec = run.specs.scores(options.experiment)
    with open_artifact(run.results / "scores" / f"{options.experiment}.h5", SCORES) as file:
        own = file.matrix("scores")[:]
    print(environment("cpu", ("torch", "numpy")))
    print(f"{own.shape[0]} training samples, {own.shape[1]} targets, ", end="")
    print(f"{len(spec.checkpoints)} checkpoints, {spec.features.projection}")
    print("| stored as | features, MiB | writing, CPU s | scoring, CPU s | mean | least | top |")
    print("|---|---|---|---|---|---|---|")
    for dtype in ("float32", "float16", "int8"):
        with tempfile.TemporaryDirectory() as temporary:
            folder, began = Path(temporary), time.process_time()
            for name in spec.checkpoints:
                old = run.files(name)[1].parent
                for split, file in (("train", "train"), (options.experiment, "targets")):
                    store(old / f"{split}.h5", folder / name / f"{file}.h5", dtype)
            size = sum(path.stat().st_size for path in folder.rglob("*.h5")) / 2**20
            wrote = time.process_time()
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                scores = score(folder, replace(spec, features=replace(spec.features, dtype=dtype)))
            scored = time.process_time()
        if dtype == "float32" and not np.array_equal(scores, own):
            raise SystemExit("the stages' scores are not the run's")
        ranks = rank_correlations(scores, own)
        same = [
            len({*np.argsort(-scores[:, j])[:_TOP]} & {*np.argsort(-own[:, j])[:_TOP]})
            for j in range(own.shape[1])
        ]
        print(
            f"| {dtype} | {size:.1f} | {wrote - began:.2f} | {scored - wrote:.2f} | "
            f"{np.mean(ranks):.5f} | {min(ranks):.5f} | {np.mean(same):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
