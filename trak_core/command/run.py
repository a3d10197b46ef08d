"""Run this package's Snakemake workflow for one config."""

import ast
import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from trak_core.dependency_digests import study_modules
from trak_core.errors import InputError
from trak_core.runtime.job import export_library_path

_PACKAGE = Path(__file__).parents[1]
# Options of Snakemake that limit how many jobs run at the same time.
_SET_LIMIT = ("-c", "--cores", "-j", "--jobs", "--profile")
_PROFILES = ("local", "slurm", "slurm-gpu")
# This code runs in place of `python -m snakemake`. With fewer garbage collections, Snakemake plans
# the jobs in an eighth less time. gc.freeze saves half a second at exit.
_SNAKEMAKE = """
import atexit, gc, sys
atexit.register(gc.freeze)
gc.set_threshold(100_000, 50, 100)
from snakemake.cli import main
sys.argv[0] = "snakemake"
"""
_CALL, _CALL_WITH_BRIEF_LOG = "main()", 'main(["--logger=trak", *sys.argv[1:]])'
# Options of Snakemake with which jobs may run on other machines.
_ELSEWHERE = ("-e", "--executor", "--profile", "--workflow-profile")
# The process from which jobs are forked imports these modules in advance. They are for all jobs,
# for jobs that use an optimizer, and for studies of texts.
_STAGES = "trak_core.runtime.job:import_stages()"
_OPTIMIZERS = "torch._dynamo"
_TEXTS = ("transformers.AutoModelForCausalLM", "transformers.AutoTokenizer")
# A study whose code contains one of these words may change environment variables or import paths
# before it imports packages. In this case, the packages must not be imported in advance.
_CHANGES_IMPORTS = re.compile(rb"\b(environb?|putenv|unsetenv|dotenv|sys|site)\b")


def workflow_folder() -> Path:
    """Return the folder that contains the Snakefile, in an installed package or in a checkout."""
    in_wheel = _PACKAGE / "workflow"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "workflow"


def _profile(name: str) -> str:
    """Return the path of this package's profile ``name``, or ``name`` for any other profile."""
    if name not in _PROFILES or Path(name).is_dir():
        return name
    in_wheel = workflow_folder() / "profiles" / name
    return str(in_wheel if in_wheel.is_dir() else workflow_folder().parent / name)


def snakemake_command(config: str, arguments: Sequence[str]) -> list[str]:
    """Return the Snakemake command line that runs the workflow for a config.

    ``arguments`` are targets and options of Snakemake. If no option limits the number of jobs, all
    cores are used.
    """
    if any(argument.startswith("--configfile") for argument in arguments):
        raise InputError(
            f"`trak run` takes only one config. Found {config} and --configfile. Put all keys into "
            "one file. Alternatively, call Snakemake with two files, of which the second overrides "
            f"keys of the first: `snakemake --snakefile {workflow_folder() / 'Snakefile'} "
            f"--configfile {config} SECOND_FILE`.",
            code="command.second_config",
        )
    options = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        prefix = "--profile=" if argument.startswith("--profile=") else ""
        is_profile = prefix or before == "--profile"
        value = argument.removeprefix(prefix)
        options.append(prefix + (_profile(value) if is_profile else value))
    if not any(option.startswith(_SET_LIMIT) for option in options):
        options += ["--cores", "all"]
    # Without `=`, the option --configfile would also take the targets that follow it as values.
    snakefile = str(workflow_folder() / "Snakefile")
    return ["snakemake", f"--snakefile={snakefile}", f"--configfile={config}", *options]


def check_config_file(word: str, config: str) -> None:
    """Raise an error if ``config``, the argument of a subcommand, is not a config file."""
    if not config.endswith((".yaml", ".yml", ".json")) or not Path(config).is_file():
        raise InputError(
            f"The first argument of `trak {word}` must be an existing config file whose name ends "
            f"in .yaml, .yml or .json. Found {config} (relative to {Path.cwd()}).",
            code="command.no_config",
        )


def _is_elsewhere(arguments: Sequence[str]) -> bool:
    is_set = "SNAKEMAKE_PROFILE" in os.environ
    return is_set or any(argument.startswith(_ELSEWHERE) for argument in arguments)


def _read(config: Path) -> Any:
    """Return the content of a config. A YAML config must be valid, and for JSON return None."""
    if config.suffix == ".json":
        return None
    try:
        return yaml.safe_load(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError):
        from trak_core.config.read_config import check_unique_keys  # The import takes 0.1 s.

        check_unique_keys(config)
        raise


def _can_fork() -> bool:
    """Return whether jobs can run as forked processes, which requires Linux without a GPU."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def study_imports(study: Path) -> list[str]:
    """Return the sorted dotted names that a study's top-level code imports from packages.

    If the code may change the effect of imports (see ``_CHANGES_IMPORTS``), the list is empty.
    """
    modules = study_modules(study)
    contents = [file.read_bytes() for file in modules.values()]
    if any(_CHANGES_IMPORTS.search(content) for content in contents):
        return []
    imported: set[str] = set()
    for node in (node for content in contents for node in ast.parse(content).body):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.update(f"{node.module}.{alias.name}" for alias in node.names)
    local = {name[0] for name in modules}
    return sorted(name for name in imported if name.split(".")[0] not in local)


def preloaded(config: Any) -> list[str]:
    """Return the modules that are imported in advance, in the process that forks the jobs."""
    config = config if isinstance(config, dict) else {}
    study = str(config.get("study"))
    names = [_STAGES]
    with suppress(Exception):  # Errors in the config or the study are reported later.
        # If a report exists, all models have been trained, so jobs probably need no optimizer.
        is_trained = Path(config.get("results", "results"), "report.html").exists()
        if {"training", "evaluation"} & config.keys() and not is_trained:
            names.append(_OPTIMIZERS)
        if study.endswith(".py"):
            names += study_imports(Path(study))
        else:
            from trak_core.config.bind_study_arguments import READY_MADE

            is_of_texts = READY_MADE[study].takes_weights
            names += [f"trak_core.ready_made.{study}", *(_TEXTS if is_of_texts else ())]
    return names


def run(config: str, arguments: Sequence[str]) -> None:
    """Print the Snakemake command line for a config, and replace this process by Snakemake."""
    check_config_file("run", config)
    if find_spec("snakemake") is None:
        raise InputError(
            "`trak run` needs Snakemake, which is not installed in this Python environment. Run: "
            "pip install 'trak-core[workflow]'.",
            code="command.no_snakemake",
        )
    content = _read(Path(config))
    is_here = not _is_elsewhere(arguments)
    preload = preloaded(content) if is_here and _can_fork() else []
    # With --forks-late, the first job starts the imports, so a run without jobs imports nothing.
    forks = ["--executor=forks", "--forks-late", f"--forks-preload={','.join(preload)}"]
    command = snakemake_command(config, [*arguments, *(forks if preload else [])])
    print(shlex.join(command), file=sys.stderr, flush=True)
    export_library_path()
    # With -P, modules in the working folder do not shadow installed modules.
    code = _SNAKEMAKE + (_CALL_WITH_BRIEF_LOG if is_here else _CALL)
    # ruff: ignore[start-process-with-no-shell] -- this Python, with separate arguments
    os.execv(sys.executable, [sys.executable, "-P", "-c", code, *command[1:]])
