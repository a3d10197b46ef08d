"""Time, memory and disk of the stages, on noise as images and the default study's network.

    python benchmarks/sizes.py --train 50000 --targets 1000 --proj-dim 2048 --checkpoints 2

Each stage runs in a process of its own, like a job, one after the other. The artifacts go to a
temporary folder (--folder to choose) and are deleted. Prints a table of seconds, peak resident
memory and file sizes, beside the formulas for disk of docs/explanation/memory-and-speed.md.
"""

import argparse
import io
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

from trak_core.dependency_digests import content_digest
from trak_core.spec import FeaturesSpec, ScoresSpec
from trak_core.system.job import keep_freed, stage_of

# The default study's network on as many images as asked for, of uniform noise.
_STUDY = """
import sys
import torch
from torch.utils.data import TensorDataset
sys.path.insert(0, {config!r})
from digits import make_model

def _noise(n):
    return TensorDataset(torch.rand(n, 1, 8, 8), torch.arange(n) % 10)

def train_data():
    return _noise({n})

def target_data():
    return _noise({m})
"""


def write_study(study: Path, n: int, m: int, checkpoints: list[str]) -> None:
    """Write a study of n training samples and m targets, and checkpoints of random weights."""
    import torch  # here alone: a process passes its peak memory on to those that it starts

    from trak_core.study.study import Study

    config = str(Path(__file__).parents[1] / "config")
    study.write_text(_STUDY.format(config=config, n=n, m=m))
    model = Study.load(study).make_model()
    for seed, checkpoint in enumerate(checkpoints):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.data, std=0.1, generator=generator)
        torch.save(model.state_dict(), study.parent / f"{checkpoint}.pt")


def _measured(rule: str, arguments: dict, queue: multiprocessing.Queue) -> None:
    sys.stdout = io.StringIO()  # progress bars
    keep_freed()  # as jobs do
    run = stage_of(rule)
    start = time.perf_counter()
    run(**arguments)
    seconds = time.perf_counter() - start
    queue.put((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measured(rule: str, **arguments: object) -> tuple[float, float]:
    """Return seconds and peak MiB of one call of a rule's stage in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measured, args=(rule, arguments, queue))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{rule} failed")
    return queue.get()


def main() -> None:
    """Parse the command line, run every stage, print the table."""
    parser = argparse.ArgumentParser(description="Time, memory and disk of the stages.")
    parser.add_argument("--train", type=int, default=50_000, help="n")
    parser.add_argument("--targets", type=int, default=1000, help="m")
    parser.add_argument("--proj-dim", type=int, default=2048, help="k")
    parser.add_argument("--checkpoints", type=int, default=2, help="C")
    parser.add_argument("--memory-mb", type=int, default=1000, help="compute.memory_mb")
    parser.add_argument("--threads", type=int, default=1, help="compute.threads")
    parser.add_argument("--keep", choices=["full", "top_k"], default="full", help="scoring.keep")
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
        study = folder / "noise.py"
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=write_study, args=(study, n, m, ids))
        process.start()
        process.join()
        spec = ScoresSpec(
            features=FeaturesSpec(
                model_output="image_classification",
                parameter_patterns=None,
                projection={"kind": "rademacher", "proj_dim": k, "seed": 0},
                dtype="float32",
                study_digest="",
            ),
            damping=2,
            weighting="plain",
            experiment="mine",
            targets_digest=content_digest(list(range(m))),
            runs={checkpoint: [checkpoint] for checkpoint in ids},
            combine="product_of_averages",
            loss_weight_power=0.5,
        )
        for checkpoint in ids:
            own = spec.under(checkpoint)
            train, target = (folder / f"{checkpoint}-{name}.h5" for name in ("train", "mine"))
            matrix, scores = (folder / f"{checkpoint}-{name}.h5" for name in ("matrix", "scores"))
            for file, features, targets, n_rows in (
                (train, own.of_train(), None, n),
                (target, own.of_targets(), list(range(m)), m),
            ):
                cost = measured(
                    "compute_features",
                    features=file,
                    checkpoint=folder / f"{checkpoint}.pt",
                    study_file=study,
                    spec=features,
                    targets=targets,
                    code="",
                    device="cpu",
                    batch_size=64,
                    memory_mb=budget,
                    threads=options.threads,
                )
                report(f"compute_features {features.split}", cost, file, 4 * n_rows * k)
            cost = measured(
                "compute_normal_matrix",
                normal_matrix=matrix,
                features=train,
                spec=own.of_normal_matrix(),
                code="",
                memory_mb=budget,
            )
            report("compute_normal_matrix", cost, matrix, 8 * k * k)
            cost = measured(
                "compute_scores",
                scores=scores,
                train_path=train,
                targets_path=target,
                normal_matrix=matrix,
                spec=own,
                keep=options.keep,
                code="",
                memory_mb=budget,
            )
            formula = 4 * n * m if options.keep == "full" else 8 * k * m
            report("compute_scores", cost, scores, formula)
        final = folder / "scores.h5"
        cost = measured(
            "average_scores",
            scores=final,
            checkpoint_scores=[folder / f"{c}-scores.h5" for c in ids],
            features=[folder / f"{c}-train.h5" for c in ids] if options.keep == "top_k" else [],
            spec=spec,
            defaults="",
            columns="",
            top=20,
            code="",
            memory_mb=budget,
        )
        report("average_scores", cost, final, 4 * n * m if options.keep == "full" else 0)


if __name__ == "__main__":
    main()
