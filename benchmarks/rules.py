"""What jobs of each rule take: as forks, started by themselves, and their imports alone.

    python benchmarks/rules.py config/smoke.yaml

runs a study twice by the repository's Snakefile, its jobs as forks and (`--no-hooks`) each by
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
from pathlib import Path

import yaml
from machine import environment

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
        forked, of_forks = _run(config, Path(name) / "forked")
        alone, by_itself = _run(config, Path(name) / "alone", "--no-hooks")
    study = yaml.safe_load(Path(config).read_text(encoding="utf-8"))["study"]
    bare = _process("pass")
    loaded = _process(f"{_LOAD}Study.load(Path(sys.argv[1]))", study) - _process(_LOAD)
    print(f"whole run: {forked:.1f} s forked, {alone:.1f} s by themselves; one job at a time")
    print(f"loading the study: {loaded:.2f} s beside torch")
    print("| rule | forked, s | by itself, s | stage's imports, s |\n|---|---|---|---|")
    stages = [path.stem for path in (_REPOSITORY / "trak_core/stages").glob("[a-z]*.py")]
    for rule, seconds in by_itself.items():
        (stage,) = [one for one in stages if rule.startswith(one)]
        imports = _process(f"import trak_core.stages.{stage}") - bare
        print(f"| {rule} | {of_forks[rule]:.2f} | {seconds:.2f} | {imports:.2f} |", flush=True)


if __name__ == "__main__":
    main()
