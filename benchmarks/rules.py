"""What jobs of each rule take: as forks, started by themselves, and their imports alone.

    python benchmarks/rules.py config/smoke.yaml

runs a study twice by the repository's Snakefile, its jobs as forks (`--profile local`) and each by
itself, one at a time, and prints for each rule the medians of Snakemake's own seconds; those of a
bare interpreter that imports the rule's stage, and nothing of the study; and of one that loads the
study. What is left of a job started by itself is its work. The study's file and tables are found
from the folder that this is started in; results are written elsewhere.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import yaml
from machine import environment

from trak_core.system.job import stage_module

_REPOSITORY = Path(__file__).parents[1]
_ROUNDS = 5
_LOAD = "import sys; from pathlib import Path; from trak_core.study.study import Study; "


def _seconds(results: Path) -> dict[str, float]:
    """Return the median seconds of a rule's jobs, by rule."""
    found = defaultdict(list)
    folder = results / "benchmarks"
    for path in folder.rglob("*.tsv"):
        with path.open(newline="", encoding="utf-8") as file:
            seconds = [float(row["s"]) for row in csv.DictReader(file, delimiter="\t")]
        found[path.relative_to(folder).with_suffix("").parts[0]] += seconds
    return {rule: statistics.median(seconds) for rule, seconds in sorted(found.items())}


def _run(config: str, results: Path, *more: str) -> tuple[float, dict[str, float]]:
    """Run a study from nothing; return its seconds, and those of its rules."""
    command = [str(Path(sys.executable).with_name("snakemake")), "--cores", "1", *more]
    command += ["--snakefile", str(_REPOSITORY / "Snakefile"), "--configfile", config]
    began = time.perf_counter()
    subprocess.run([*command, "--config", f"results={results}", "--quiet"], check=True)
    return time.perf_counter() - began, _seconds(results)


def _module(rule: str) -> str:
    """Return the module of a rule's stage, whose name a rule's begins with."""
    words = rule.split("_")
    names = (stage_module("_".join(words[:n])) for n in range(len(words), 0, -1))
    return next(name for name in names if find_spec(name))


def _process(code: str, *arguments: str) -> float:
    """Return the median seconds of an interpreter that runs some code."""
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    """Run the study both ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", help="of the study")
    config = parser.parse_args().config
    print(environment("cpu", ("torch", "numpy", "numba", "snakemake")))
    with tempfile.TemporaryDirectory() as name:
        forked, of_forks = _run(config, Path(name) / "forked", f"--profile={_REPOSITORY / 'local'}")
        alone, by_itself = _run(config, Path(name) / "alone")
    study = yaml.safe_load(Path(config).read_text(encoding="utf-8"))["study"]
    bare = _process("pass")
    loaded = _process(f"{_LOAD}Study.load(Path(sys.argv[1]))", study) - _process(_LOAD)
    print(f"whole run: {forked:.1f} s forked, {alone:.1f} s by themselves; one job at a time")
    print(f"loading the study: {loaded:.2f} s beside torch")
    print("| rule | forked, s | by itself, s | stage's imports, s |\n|---|---|---|---|")
    for rule, seconds in by_itself.items():
        imports = _process(f"import {_module(rule)}") - bare
        print(f"| {rule} | {of_forks[rule]:.2f} | {seconds:.2f} | {imports:.2f} |", flush=True)


if __name__ == "__main__":
    main()
