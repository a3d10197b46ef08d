"""A folder with a small study in it, where Snakemake runs for real."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import patience
import pytest
import yaml
from forked_python import start_server

REPOSITORY = Path(__file__).parents[2]
# Jobs are forks, as with `trak run`, which takes half of the time.
FORKS = ("--profile", str(REPOSITORY / "local"))
_CODE = ("Snakefile", "workflow", "trak_core", "profiles", "local", "slurm", "slurm-gpu")


_ending = contextlib.ExitStack()  # closed when a worker's tests are over


@cache
def forked_python() -> str:
    """Return a program that is Python, without the time that imports take; one for all tests."""
    folder = Path(_ending.enter_context(tempfile.TemporaryDirectory(prefix="trak-")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}")
        # torch makes a folder where its `_dynamo` is imported, as peft does: not in some test's.
        patch.setenv("TMPDIR", str(folder))
        program, server = start_server(folder)
    _ending.enter_context(server)  # the end of its standard input ends it
    return str(program)


def stop_forked_python() -> None:
    """End the process behind that program, if there is one."""
    _ending.close()


def snakemake(folder: Path, *arguments: str, python: str | None = None) -> tuple[int, str]:
    """Return exit status and output of Snakemake's command, run in a folder."""
    result = patience.run(
        (python or forked_python(), "-m", "snakemake", *arguments),
        500,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return result.returncode, result.stdout


def set_key(config: dict[str, Any], path: str, value: Any) -> None:
    """Set a value by its path, such as scoring.damping; None takes it away."""
    *above, last = path.split(".")
    for name in above:
        config = config[name]
    if value is None:
        del config[last]
    else:
        config[last] = value


def as_a_module(prefix: str = "") -> str:
    """A Snakefile that has the workflow as its module, with the config in a file."""
    lines = [
        'configfile: "study.yaml"',
        "module trak:",
        f'    snakefile: "{REPOSITORY / "workflow/Snakefile"}"',
        "    config: config",
        *([f'    prefix: "{prefix}"'] if prefix else []),
        "use rule * from trak as trak_*",
    ]
    return "\n".join([*lines, ""])


class Workspace:
    """A folder that Snakemake runs in; ``config`` is written before every run.

    The repository's own Snakefile runs there, whose kernels are compiled already: a copy of the
    code would compile its own. A test that edits the code takes such a copy.
    """

    def __init__(
        self, folder: Path, config: dict, snakefile: str = str(REPOSITORY / "Snakefile")
    ) -> None:
        self.folder, self.config, self.snakefile = folder, config, snakefile

    @classmethod
    def make(cls, folder: Path, study: str, config: dict) -> "Workspace":
        folder.mkdir(parents=True)
        shutil.copy2(REPOSITORY / "tests/studies" / study, folder / study)
        return cls(folder, {"study": study, **config})

    def take_code(self) -> None:
        """Bring a copy of the repository's code, to be edited, and run by that from now on."""
        for part in _CODE:
            source = REPOSITORY / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.part")
                shutil.copytree(source, self.folder / part, ignore=ignored)
            else:
                shutil.copy2(source, self.folder / part)
        self.snakefile = "Snakefile"

    def copy(self, folder: Path) -> "Workspace":
        shutil.copytree(self.folder, folder, symlinks=True)
        config = yaml.safe_load(yaml.safe_dump(self.config))
        return Workspace(folder, config, self.snakefile)

    def path(self, name: str) -> Path:
        return self.folder / name

    def snakemake(
        self, *arguments: str, text: str | bytes | None = None, python: str | None = None
    ) -> tuple[int, str]:
        """Run Snakemake as a user would, with the config in a file; exit status and output.

        Jobs are forks unless a test chooses how they run. Snakemake's own executor runs jobs of
        tests/pages and tests/cluster.
        """
        chooses = {"--executor", "--profile", "--default-storage-provider"} & {*arguments}
        text = yaml.safe_dump(self.config, sort_keys=False) if text is None else text
        self.path("study.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return snakemake(
            self.folder,
            *("--configfile", "study.yaml", "--snakefile", self.snakefile),
            *(() if chooses else FORKS),
            *(arguments if "--cores" in arguments else ("--cores", "2", *arguments)),
            python=python,
        )

    def run(self, *arguments: str) -> dict[str, int]:
        """Run to a good end and return how many jobs of each rule ran."""
        status, output = self.snakemake(*(arguments or ("scores",)))
        assert status == 0, output
        return jobs(output)

    def would_run(self, *arguments: str) -> dict[str, int]:
        """Return how many jobs of each rule a run would have: nothing runs."""
        return self.run("--dry-run", *(arguments or ("scores",)))

    def would_write(self, *arguments: str) -> set[str]:
        """Return the artifacts that a run would write, by their names in the results folder."""
        status, output = self.snakemake("--summary", *(arguments or ("scores",)))
        assert status == 0, output
        rows = [line.split("\t") for line in output.splitlines()]
        written = [row[0] for row in rows if row[-1] == "update pending"]
        return {name.removeprefix("results/") for name in written}

    def fail(self, *arguments: str, text: str | bytes | None = None) -> str:
        """Run to a bad end and return what Snakemake printed."""
        status, output = self.snakemake(*(arguments or ("scores",)), text=text)
        assert status != 0, output
        return output

    def artifacts(self) -> dict[str, bytes]:
        return artifacts_in(self.path("results"))


def artifacts_in(results: Path) -> dict[str, bytes]:
    return {str(p.relative_to(results)): p.read_bytes() for p in sorted(results.rglob("*.h5"))}


def scoring(n_checkpoints: int, n_experiments: int) -> dict[str, int]:
    """Jobs of each rule that score experiments from nothing, under checkpoints that are there."""
    return {
        "compute_features": n_checkpoints * (1 + n_experiments),
        "compute_normal_matrix": n_checkpoints,
        "compute_scores": n_checkpoints * n_experiments,
        "average_scores": n_experiments,
    }


def jobs(output: str) -> dict[str, int]:
    """Read Snakemake's own table of jobs, and make sure that all of them ended well."""
    rows = re.findall(r"^(\w+) +(\d+)$", output.split("Job stats:")[-1], flags=re.MULTILINE)
    counts = {rule: int(n) for rule, n in rows}
    total = counts.pop("total", 0)
    if total:
        assert f"{total} of {total} steps (100%) done" in output or "dry-run" in output, output
    else:
        assert "Nothing to be done" in output, output
    return {rule: n for rule, n in counts.items() if rule not in ("all", "scores", "report")}
