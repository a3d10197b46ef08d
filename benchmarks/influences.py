"""From features to top influences: the stages, numpy by hand, and FAISS where it is installed.

    python benchmarks/influences.py --train 100000 --targets 1000 --proj-dim 512 --faiss

Features are noise, written as artifacts and as a .npy file. Each side is a process of its own with
one thread, in turn: the stages `compute_normal_matrix`, `compute_scores` and `average_scores` with
`scoring.keep: top_k`, as jobs run them; numpy on the mapped .npy file with float32 products and a
partition of each block; FAISS's exact index of inner products, searched for either sign, which has
no normal matrix and no damping. Prints CPU seconds, peak MiB, MiB read and written (Linux), and
ratios to numpy's CPU. Says nothing if the stages' influences are not numpy's: of each target the
same 20 helpful training samples, except such as differ by less than 1e-5 of the largest.
"""

import os

# Before numpy: libraries read it when they are imported.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import argparse
import io
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import FEATURES, SCORES, create, open_artifact
from trak_core.dependency_digests import content_digest
from trak_core.spec import FeaturesSpec, ScoresSpec
from trak_core.system.job import keep_freed, stage_of

_ROWS = 8192
_TOP = 20


def spec_of(k: int, m: int) -> ScoresSpec:
    """Return what decides the scores of one checkpoint `c0` of a regression."""
    features = FeaturesSpec(
        model_output="regression",
        parameter_patterns=None,
        projection={"kind": "rademacher", "proj_dim": k, "seed": 0},
        dtype="float32",
        study_digest="",
    )
    return ScoresSpec(
        features=features,
        damping=0.1,
        weighting="plain",
        experiment="mine",
        targets_digest=content_digest(list(range(m))),
        runs={"c0": ["c0"]},
        combine="product_of_averages",
        loss_weight_power=1.0,
    )


def write_features(folder: Path, n: int, m: int, k: int) -> None:
    """Write features of both splits, of correlated columns, as artifacts and as .npy files."""
    spec, rng = spec_of(k, m).under("c0"), np.random.default_rng(0)
    scale = np.geomspace(1, 0.1, k).astype(np.float32)
    for name, own, rows in (("train", spec.of_train(), n), ("mine", spec.of_targets(), m)):
        about = own.as_dict() | {"checkpoint": {"id": "c0"}, "parameters_digest": ""}
        plain = np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=(rows, k)
        )
        with create(folder / f"{name}.h5", FEATURES, about, {}) as file:
            values = file.matrix("features", range(rows), range(k), chunks=(256, k))
            for start in range(0, rows, _ROWS):
                block = rng.standard_normal((min(_ROWS, rows - start), k), np.float32) * scale
                values[start : start + _ROWS] = plain[start : start + _ROWS] = block
            file.vector("sample_ids", np.arange(rows))
            for key in ("labels", "outputs", "predictions", "loss_weights"):
                file.vector(key, np.ones(rows, np.float32))


def stage(folder: Path, rule: str, n: int, m: int, k: int) -> None:
    """Run one stage as a job does."""
    spec, memory = spec_of(k, m), {"code": "", "memory_mb": 1000}
    train, matrix, solved = (folder / f"{name}.h5" for name in ("train", "matrix", "solved"))
    own = spec.under("c0")
    arguments: dict[str, dict[str, Any]] = {
        "compute_normal_matrix": {
            "normal_matrix": matrix,
            "features": train,
            "spec": own.of_normal_matrix(),
        },
        "compute_scores": {
            "scores": solved,
            "train_path": train,
            "targets_path": folder / "mine.h5",
            "normal_matrix": matrix,
            "spec": own,
            "keep": "top_k",
        },
        "average_scores": {
            "scores": folder / "scores.h5",
            "checkpoint_scores": [solved],
            "features": [train],
            "spec": spec,
            "defaults": "",
            "columns": "",
            "top": _TOP,
        },
    }
    keep_freed()
    stage_of(rule)(**arguments[rule], **memory)


def by_hand(folder: Path, n: int, m: int, k: int) -> None:
    """Do the same by numpy: the normal matrix, the solve, and the largest of either sign."""
    phi, targets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "mine"))
    normal = np.zeros((k, k))
    for start in range(0, n, _ROWS):
        block = np.asarray(phi[start : start + _ROWS])
        normal += block.T @ block
    normal[np.diag_indices(k)] += 0.1 * np.trace(normal) / n
    solved = np.linalg.solve(normal, targets.T.astype(np.float64)).astype(np.float32)
    rows, kept = {}, {}
    for start in range(0, n, _ROWS):
        scores = np.asarray(phi[start : start + _ROWS]) @ solved
        for sign in (1, -1):
            order = np.argpartition(-sign * scores, min(_TOP, len(scores) - 1), axis=0)[:_TOP]
            own = np.take_along_axis(sign * scores, order, axis=0)
            order += start
            if start:
                own, order = np.vstack([kept[sign], own]), np.vstack([rows[sign], order])
            best = np.argsort(-own, axis=0)[:_TOP]
            kept[sign], rows[sign] = (np.take_along_axis(v, best, axis=0) for v in (own, order))
    np.savez(folder / "hand.npz", rows=rows[1], scores=kept[1])


def by_faiss(folder: Path, n: int, m: int, k: int) -> None:
    """Search the exact index of inner products for the targets and for their negatives."""
    import faiss  # pyright: ignore[reportMissingImports] -- not one of ours

    faiss.omp_set_num_threads(1)
    targets, index = np.load(folder / "mine.npy"), faiss.IndexFlatIP(k)
    with (folder / "train.npy").open("rb") as file:
        # By blocks, so that the index alone is in memory.
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        for start in range(0, n, _ROWS):
            rows = min(_ROWS, n - start)
            index.add(np.fromfile(file, np.float32, rows * k).reshape(rows, k))
    for sign in (1, -1):
        index.search(sign * targets, _TOP)


def _child(side: Callable[[], None], queue: multiprocessing.Queue) -> None:
    sys.stdout = io.StringIO()  # progress bars
    before, began = _moved(), time.process_time()
    side()
    seconds, peak = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    queue.put((seconds, peak / 1024, *((_moved() - before) / 2**20)))


def _moved() -> np.ndarray:
    """Return bytes that this process has read and written so far."""
    about = Path("/proc/self/io")
    words = about.read_text().split() if about.exists() else ["0"] * 4
    return np.array([int(words[1]), int(words[3])])


def measured(side: Callable[[], None]) -> tuple[float, float, float, float]:
    """Return CPU seconds, peak MiB, MiB read and MiB written of a side in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(side, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("a side failed")
    return queue.get()


def check(folder: Path) -> None:
    """Refuse to go on if the stages' most helpful samples are not numpy's."""
    with open_artifact(folder / "scores.h5", SCORES) as file:
        top = file.table("top_influences")
    top = top.loc[top["sign"] == 1].sort_values(by=["target_id", "rank"])
    hand = np.load(folder / "hand.npz")
    rows, scores = (top[key].to_numpy().reshape(-1, _TOP).T for key in ("train_id", "score"))
    close = np.abs(scores - hand["scores"]) <= 1e-5 * np.abs(scores).max()
    if not close.all() or (rows != hand["rows"]).mean() > 0.01:
        raise SystemExit("the stages' influences are not numpy's")


def main() -> None:
    """Parse the command line, run every side, print the table."""
    parser = argparse.ArgumentParser(description="From features to top influences.")
    parser.add_argument("--train", type=int, default=100_000, help="n")
    parser.add_argument("--targets", type=int, default=1000, help="m")
    parser.add_argument("--proj-dim", type=int, default=512, help="k")
    parser.add_argument("--faiss", action="store_true", help="measure the package faiss-cpu too")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    sizes = options.train, options.targets, options.proj_dim
    print("n = {}, m = {}, k = {}".format(*sizes))
    print(f"{'side':<24}{'CPU s':>9}{'peak MiB':>10}{'MiB read':>10}{'written':>10}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        measured(partial(write_features, folder, *sizes))
        rules = ("compute_normal_matrix", "compute_scores", "average_scores")
        sides = {rule: partial(stage, folder, rule, *sizes) for rule in rules}
        sides["numpy"] = partial(by_hand, folder, *sizes)
        if options.faiss:
            sides["FAISS"] = partial(by_faiss, folder, *sizes)
        costs = {}
        for name, side in sides.items():
            costs[name] = measured(side)
            print(
                "{:<24}{:>9.1f}{:>10.0f}{:>10.0f}{:>10.0f}".format(name, *costs[name]), flush=True
            )
        check(folder)
        ours = sum(costs[rule][0] for rule in rules)
        print(f"stages together: {ours:.1f} s, {ours / costs['numpy'][0]:.2f} of numpy", end="")
        print(f", {ours / costs['FAISS'][0]:.2f} of FAISS" if options.faiss else "")


if __name__ == "__main__":
    main()
