"""How long Snakemake plans a large study: what a dry run costs before any job.

    python benchmarks/scale.py --checkpoints 200 --experiments 10 --shards 4

Every split is cut into the shards. The first dry run runs the preflight, in which a process imports
torch, the second finds that on record. With `--batch 1/10` both plan a tenth of the experiments.
Before them Snakemake plans a bare workflow of as many jobs, and files of like names, whose rules
have input and output alone: the least that so many jobs cost it. Prints jobs, seconds by the clock
and of the processor, which depend less on what else runs, and peak memory.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

_REPOSITORY = Path(__file__).parents[1]
_STUDY = """
import torch
from torch.utils.data import TensorDataset

def make_model():
    return torch.nn.Linear(8, 1)

def train_data():
    return TensorDataset(torch.rand(1000, 8), torch.rand(1000))

target_data = train_data
"""


_BARE = r"""
C = [f"c{{i:04d}}" for i in range({checkpoints})]
E = [f"e{{i}}" for i in range({experiments})]
PARTS = [f"{{i}}-of-{shards}" for i in range({shards})]

wildcard_constraints:
    c=r"c\d+", split=r"train|e\d+", e=r"e\d+", part=r"\d+-of-{shards}"

rule all:
    input: "results/report.html", expand("results/answers/{{e}}.html", e=E)
rule shard:
    input: "checkpoints/{{c}}.pt"
    output: "results/shards/{{c}}/{{split}}/{{part}}.h5"
rule join:
    input: expand("results/shards/{{{{c}}}}/{{{{split}}}}/{{part}}.h5", part=PARTS)
    output: "results/features/{{c}}/{{split}}.h5"
rule normal_matrix:
    input: "results/features/{{c}}/train.h5"
    output: "results/normal_matrix/{{c}}.h5"
rule scores:
    input:
        "results/features/{{c}}/train.h5",
        "results/features/{{c}}/{{e}}.h5",
        "results/normal_matrix/{{c}}.h5"
    output: "results/scores/{{e}}/{{c}}.h5"
rule average_shard:
    input: expand("results/scores/{{{{e}}}}/{{c}}.h5", c=C)
    output: "results/average/{{e}}/{{part}}.h5"
rule average:
    input: expand("results/average/{{{{e}}}}/{{part}}.h5", part=PARTS)
    output: "results/scores/{{e}}.h5"
rule draw:
    input: "results/scores/{{e}}.h5"
    output: "results/answers/{{e}}.html"
rule report:
    input: expand("results/answers/{{e}}.html", e=E), expand("results/normal_matrix/{{c}}.h5", c=C)
    output: "results/report.html"
"""


def make_study(folder: Path, checkpoints: int, experiments: int, shards: int, targets: int) -> None:
    """Write the config, and one checkpoint under many names: the preflight reads each."""
    paths = {f"c{i:04d}": f"checkpoints/c{i:04d}.pt" for i in range(checkpoints)}
    (folder / "checkpoints").mkdir()
    torch.save(torch.nn.Linear(8, 1).state_dict(), folder / "first.pt")
    for path in paths.values():
        (folder / path).hardlink_to(folder / "first.pt")
    (folder / "noise.py").write_text(_STUDY)
    config = {
        "study": "noise.py",
        "model_output": "regression",
        "checkpoints": paths,
        "experiments": {
            f"e{i}": {"targets": list(range(targets)), "shards": shards} for i in range(experiments)
        },
        "compute": {"shards": shards},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    counts = {"checkpoints": checkpoints, "experiments": experiments, "shards": shards}
    (folder / "bare.smk").write_text(_BARE.format(**counts))


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def dry_run(folder: Path, snakefile: str, *arguments: str) -> tuple[int, float, float]:
    """Return how many jobs a dry run plans, its seconds, and those of the processor."""
    start, used = time.perf_counter(), _processor_seconds()
    result = subprocess.run(
        (
            *(sys.executable, "-m", "snakemake", "--dry-run", "--configfile", "study.yaml"),
            *("--snakefile", snakefile, *arguments),
        ),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, used = time.perf_counter() - start, _processor_seconds() - used
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    total = re.search(r"^total +(\d+)$", result.stdout + result.stderr, flags=re.MULTILINE)
    assert total is not None
    return int(total[1]), seconds, used


def main() -> None:
    """Parse the command line, plan the bare workflow and twice ours, print a row each."""
    parser = argparse.ArgumentParser(description="Seconds that Snakemake plans a large study.")
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--experiments", type=int, default=10)
    parser.add_argument("--shards", type=int, default=4, help="of every split")
    parser.add_argument("--targets", type=int, default=20, help="of every experiment")
    parser.add_argument("--batch", help="of the experiments, such as 1/10; all without it")
    options = vars(parser.parse_args())
    batch = options.pop("batch")
    part = ("scores", "--batch", f"scores={batch}") if batch else ()
    print(f"{'dry run':<10}{'jobs':>8}{'seconds':>9}{'processor':>11}{'peak MiB':>10}")
    with tempfile.TemporaryDirectory() as temporary:
        make_study(Path(temporary), **options)
        snakefile = str(_REPOSITORY / "Snakefile")
        runs = {"first": (snakefile, *part), "second": (snakefile, *part)}
        # First, since the peak is that of all so far.
        for name, call in (runs if part else {"bare": ("bare.smk",), **runs}).items():
            jobs, seconds, used = dry_run(Path(temporary), *call)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            print(f"{name:<10}{jobs:>8}{seconds:>9.1f}{used:>11.1f}{peak:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
