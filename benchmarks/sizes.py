"""Time, memory and disk of the stages behind featurization, on synthetic features.

    python benchmarks/sizes.py --train 50000 --targets 1000 --proj-dim 2048 --checkpoints 2

Each stage runs in a process of its own, like a job, one after the other. Features are standard
normal numbers, made here; the artifacts go to a temporary folder (--folder to choose) and are
deleted. Prints a table of seconds, peak resident memory and file sizes, beside the README's
formulas for disk.
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trak_core.artifacts import FEATURES, create
from trak_core.spec import ProjectionSpec, stream_of
from trak_core.stages.average import average_scores
from trak_core.stages.normal_matrix import compute_normal_matrix
from trak_core.stages.scores import compute_scores


def write_features(path: Path, checkpoint: str, split: str, n_rows: int, proj_dim: int) -> None:
    """Write a features file as compute_features would."""
    rng = np.random.default_rng(len(split))
    projection = ProjectionSpec(
        kind="rademacher",  # pyright: ignore[reportArgumentType]
        n_params=10**6,
        proj_dim=proj_dim,
        seed=0,
        stream=stream_of(checkpoint),
    )
    spec = {
        "projection": projection.as_dict(),
        "parameters": "",
        "model_output": "image_classification",
        "checkpoint": {"id": checkpoint, "sha256": ""},
        "split": split,
        "dtype": "float32",
        "study": "",
        "parameter_patterns": None,
        "targets_digest": None if split == "train" else "",
    }
    with create(path, FEATURES, spec, {}) as writer:
        rows = writer.matrix("features", range(n_rows), range(proj_dim))
        for start in range(0, n_rows, 4096):
            stop = min(start + 4096, n_rows)
            rows[start:stop] = rng.standard_normal((stop - start, proj_dim), dtype=np.float32)
        writer.vector("sample_ids", np.arange(n_rows))
        writer.vector("labels", rng.integers(0, 10, n_rows))
        writer.vector("predictions", rng.integers(0, 10, n_rows))
        writer.vector("outputs", rng.standard_normal(n_rows, dtype=np.float32))
        if split == "train":
            writer.vector("loss_weights", rng.random(n_rows, dtype=np.float32))


def _measured(function: Callable, arguments: dict, queue: multiprocessing.Queue) -> None:
    start = time.perf_counter()
    function(**arguments)
    seconds = time.perf_counter() - start
    queue.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measured(function: Callable, **arguments: object) -> tuple[float, float]:
    """Return seconds and peak MiB of one call in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(function, arguments, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} failed")
    return queue.get()


def main() -> None:
    """Parse the command line, run every stage, print the table."""
    parser = argparse.ArgumentParser(description="Time, memory and disk of the stages.")
    parser.add_argument("--train", type=int, default=50_000, help="n")
    parser.add_argument("--targets", type=int, default=1000, help="m")
    parser.add_argument("--proj-dim", type=int, default=2048, help="k")
    parser.add_argument("--checkpoints", type=int, default=2, help="C")
    parser.add_argument("--memory-mb", type=int, default=1000, help="compute.memory_mb")
    parser.add_argument("--keep", choices=["full", "top_k"], default="full", help="scoring.scores")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    n, m, k, budget = options.train, options.targets, options.proj_dim, options.memory_mb
    print(f"n = {n}, m = {m}, k = {k}, C = {options.checkpoints}, memory_mb = {budget}")
    print(f"{'stage':<24}{'seconds':>9}{'peak MiB':>10}{'file MiB':>10}{'formula MiB':>13}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)

        def report(stage: str, cost: tuple[float, float], file: Path, formula: float) -> None:
            size = file.stat().st_size / 2**20
            print(
                f"{stage:<24}{cost[0]:>9.1f}{cost[1]:>10.0f}{size:>10.1f}{formula / 2**20:>13.1f}"
            )

        ids = [f"c{i}" for i in range(options.checkpoints)]
        settings = {
            "model_output": "image_classification",
            "projection": {"kind": "rademacher", "proj_dim": k, "seed": 0},
            "dtype": "float32",
            "study": "",
            "parameter_patterns": None,
        }
        for checkpoint in ids:
            expected = {**settings, "checkpoint": checkpoint}
            train, target = (folder / f"{checkpoint}-{name}.h5" for name in ("train", "mine"))
            matrix, scores = (folder / f"{checkpoint}-{name}.h5" for name in ("matrix", "scores"))
            write_features(train, checkpoint, "train", n, k)
            write_features(target, checkpoint, "mine", m, k)
            cost = measured(
                compute_normal_matrix,
                normal_matrix_file=matrix,
                features=train,
                expected={**expected, "split": "train", "targets_digest": None},
                weighting="plain",
                code="",
                memory_mb=budget,
            )
            report("(train features)", (0, 0), train, 4 * n * k)
            report("compute_normal_matrix", cost, matrix, 8 * k * k)
            cost = measured(
                compute_scores,
                scores=scores,
                train=train,
                targets=target,
                normal_matrix=matrix,
                expected={**expected, "split": "mine", "targets_digest": ""},
                damping=2,
                weighting="plain",
                keep=options.keep,
                code="",
                memory_mb=budget,
            )
            formula = 4 * n * m if options.keep == "full" else 8 * k * m
            report("compute_scores", cost, scores, formula)
        final = folder / "scores.h5"
        cost = measured(
            average_scores,
            scores=final,
            checkpoint_scores=[folder / f"{c}-scores.h5" for c in ids],
            features=[folder / f"{c}-train.h5" for c in ids] if options.keep == "top_k" else [],
            expected={
                **settings,
                "targets_digest": "",
                "experiment": "mine",
                "weighting": "plain",
                "damping": 2,
                "checkpoints": ids,
            },
            combine="product_of_averages",
            loss_weight_power=1,
            top=20,
            code="",
            memory_mb=budget,
        )
        report("average_scores", cost, final, 4 * n * m if options.keep == "full" else 0)


if __name__ == "__main__":
    main()
