"""Run the workflow that this package brings along, or that lies beside it, for one config."""

import ast
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from trak_core.dependency_digests import study_modules
from trak_core.errors import InputError
from trak_core.system.files import CONFIG_RECORD
from trak_core.system.job import name_library

_PACKAGE = Path(__file__).parents[1]
# Options by which a call says itself how much may run at a time.
_SAY_HOW_MUCH = ("-c", "--cores", "-j", "--jobs", "--profile")
_PROFILES = ("local", "slurm", "slurm-gpu")
# `python -m snakemake`, where Ctrl-C shows no traceback: its imports take a second. Jobs stay, so
# that garbage is looked for rarely, and not at the end: it would take an eighth of planning.
_SNAKEMAKE = """
import atexit, gc, sys
from trak_core.system.job import stop_before_jobs
stop_before_jobs()
atexit.register(gc.freeze)
gc.set_threshold(100_000, 50, 100)
{first}
from snakemake.cli import main
sys.argv[0] = "snakemake"
"""
# Imports of jobs begin before those of Snakemake.
_START_FORKS = """
from snakemake_executor_plugin_forks.server import set_preload, start
set_preload({preload})
start()
"""
_CALL, _CALL_BRIEFLY = "main()", 'main(["--logger=trak", *sys.argv[1:]])'
# And options by which jobs run elsewhere.
_ELSEWHERE = ("-e", "--executor", "--profile", "--workflow-profile")
# More than Snakemake writes into a folder of temporary files before the first job.
_TEMPORARY_BYTES = 64_000


# What every job may import, what an optimizer imports, and what studies of texts do.
_STAGES = "trak_core.system.job:import_stages()"
_OPTIMIZERS = "torch._dynamo"
# Words by which a study may change what an import does: by variables, or by folders.
_CHANGES_IMPORTS = re.compile(rb"\b(environb?|putenv|unsetenv|dotenv|sys|site)\b")
_OF_TEXTS = ("transformers.AutoModelForCausalLM", "transformers.AutoTokenizer")


def workflow_folder() -> Path:
    """Return the folder of the workflow's Snakefile: in the wheel, or in the checkout."""
    in_wheel = _PACKAGE / "workflow"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "workflow"


def _profile(name: str) -> str:
    """Return the path of a profile of ours, where the user's own folder has none of its name."""
    if name not in _PROFILES or Path(name).is_dir():
        return name
    in_wheel = workflow_folder() / "profiles" / name
    return str(in_wheel if in_wheel.is_dir() else workflow_folder().parent / name)


def snakemake_command(config: str, arguments: Sequence[str]) -> list[str]:
    """Return the call of Snakemake for a config.

    ``arguments`` are handed on: targets, ``-n``, ``--profile slurm`` and so on. Without a word on
    how much may run at a time, all cores may be used.
    """
    if any(argument.startswith("--configfile") for argument in arguments):
        raise InputError(
            f"`trak run` must get one config, whose keys `--config` changes. Found {config} and "
            "--configfile, whose file would take its place. Write it all into one file; or call "
            "snakemake itself, where a second file's keys count before the first's: "
            f"snakemake --snakefile {workflow_folder() / 'Snakefile'} --configfile {config} MORE.",
            code="command.second_config",
        )
    handed, before = list(arguments), ""
    for i, argument in enumerate(handed):
        option, _, value = argument.partition("=")
        if before == "--profile":
            handed[i] = _profile(argument)
        elif option == "--profile" and value:
            handed[i] = f"--profile={_profile(value)}"
        before = argument
    if not any(argument.startswith(_SAY_HOW_MUCH) for argument in handed):
        handed += ["--cores", "all"]
    # With `=` the option takes one config, and leaves targets that follow alone.
    snakefile = str(workflow_folder() / "Snakefile")
    return ["snakemake", f"--snakefile={snakefile}", f"--configfile={config}", *handed]


def check_config_file(word: str, config: str) -> None:
    """Refuse what can't be a config, after a word such as ``run``."""
    if not config.endswith((".yaml", ".yml", ".json")):
        raise InputError(
            f"`trak {word}` must get a config first, such as study.yaml. Found {config}. Name the "
            f"config, then the rest: `trak {word} study.yaml ...`.",
            code="command.no_config",
        )
    if not Path(config).is_file():
        raise InputError(
            f"The config must exist. Found nothing at {config} (from {Path.cwd()}).",
            code="command.missing_config",
        )


def _check_writing(folder: Path, role: str, remedy: str, *, code: str) -> None:
    """Refuse a folder, which may yet have to be made, that does not take a file of some length."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            written = file.write(bytes(_TEMPORARY_BYTES))
        reason = None if written == _TEMPORARY_BYTES else "No space left on device"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise InputError(f"{folder}: {role} must take files. Found: {reason}. {remedy}", code=code)


def check_folders(arguments: Sequence[str]) -> None:
    """Refuse folders that Snakemake writes to, and of which it would only print a traceback."""
    if not any(argument.startswith(("-d", "--directory")) for argument in arguments):
        _check_writing(
            Path.cwd(),
            "the folder that `trak run` is called in",
            "Make room or mend it; or call `trak run` in another folder with the study's paths in "
            "the config as seen from there.",
            code="command.working_folder",
        )
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    _check_writing(
        caches.absolute(),
        "Snakemake's folder of caches",
        "Name another one for this call: `XDG_CACHE_HOME=$PWD/.cache trak run ...`.",
        code="command.cache_folder",
    )
    # As the scheduler's own library looks for it; it takes the working folder if there is none.
    names = [os.environ[name] for name in ("TMP", "TMPDIR") if name in os.environ]
    temporary = Path(names[0] if names else "/tmp")  # ruff: ignore[hardcoded-temp-file]
    if temporary.is_dir() and os.access(temporary, os.W_OK):
        _check_writing(
            temporary.absolute(),
            "the folder of temporary files",
            "Make room, or name another one for this call: `TMPDIR=$PWD trak run ...`.",
            code="command.temporary_folder",
        )


def _is_elsewhere(arguments: Sequence[str]) -> bool:
    given = ["--profile"] if "SNAKEMAKE_PROFILE" in os.environ else arguments
    return any(argument.startswith(_ELSEWHERE) for argument in given)


def _read(config: Path) -> Any:
    """Return what a config says. One that is no YAML is refused with its line."""
    if config.suffix == ".json":
        return None
    try:
        return yaml.safe_load(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError):
        from trak_core.config.read_config import check_unique_keys  # a tenth of a second

        check_unique_keys(config)
        raise


def _is_new(config: Path, said: Any) -> bool:
    """Whether there will be jobs to do: the config is younger than the last start, or the first."""
    try:
        record = Path(said.get("results", "results")) / CONFIG_RECORD
        return not record.exists() or config.stat().st_mtime > record.stat().st_mtime
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _can_fork() -> bool:
    """Return whether jobs are forks: on Linux, where no job can use a GPU."""
    return sys.platform == "linux" and not Path("/dev/nvidiactl").exists()


def study_imports(study: Path) -> list[str]:
    """Return dotted names of what a study always imports and doesn't lie beside it, sorted.

    Empty if the study may change what an import does.
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
    beside = {name[0] for name in modules}
    return sorted(name for name in imported if name.split(".")[0] not in beside)


def preloaded(said: Any) -> list[str]:
    """Return what the process that forks for a config's jobs imports."""
    said = said if isinstance(said, dict) else {}
    study = str(said.get("study"))
    names = [_STAGES]
    with suppress(Exception):  # the start says what is wrong with the config and the study
        # Once there is a report, a further question trains nothing.
        is_trained = Path(said.get("results", "results"), "report.html").exists()
        if {"training", "evaluation"} & said.keys() and not is_trained:
            names.append(_OPTIMIZERS)
        if study.endswith(".py"):
            names += study_imports(Path(study))
        else:
            from trak_core.config.bind_study_arguments import READY_MADE

            is_of_texts = READY_MADE[study].takes_weights
            names += [f"trak_core.ready_made.{study}", *(_OF_TEXTS if is_of_texts else ())]
    return names


def run(config: str, arguments: Sequence[str]) -> None:
    """Print Snakemake's call for a config and become it."""
    check_config_file("run", config)
    if find_spec("snakemake") is None:
        raise InputError(
            "`trak run` must find Snakemake in its own Python. Found none: "
            "pip install 'trak-core[workflow]'.",
            code="command.no_snakemake",
        )
    said = _read(Path(config))
    is_here = not _is_elsewhere(arguments)
    preload = preloaded(said) if is_here and _can_fork() else []
    # Late: a start that has nothing to do needs no imports.
    forks = ["--executor=forks", "--forks-late", f"--forks-preload={','.join(preload)}"]
    command = snakemake_command(config, [*arguments, *(forks if preload else [])])
    print(shlex.join(command), file=sys.stderr, flush=True)
    check_folders(arguments)
    is_early = preload and _is_new(Path(config), said)
    first = _START_FORKS.format(preload=preload) if is_early else ""
    name_library()
    # Until the next Python can hear it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        # -P: a module in the working folder must not shadow an installed one.
        code = _SNAKEMAKE.format(first=first) + (_CALL_BRIEFLY if is_here else _CALL)
        # ruff: ignore[start-process-with-no-shell] -- this very Python, and words that stay apart
        os.execv(sys.executable, [sys.executable, "-P", "-c", code, *command[1:]])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
