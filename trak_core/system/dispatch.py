"""From a rule to its stage: what the rule names is what the stage takes. Only this knows Snakemake.

The param ``code`` says which stage: a workflow that uses this one as a module may rename its rules.
"""

import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trak_core.spec import FeaturesSpec, NormalSpec, RetrainedSpec, ScoresSpec, parse_spec
from trak_core.system.job import logged_to

# Params that decide whether a job runs again, whether or not its stage takes them.
_TRIGGERS = {"code", "signature", "digest"}
# What stages import only when they come to it.
_TABLES, _FIGURES = ("pandas", "tables"), ("matplotlib.backends.backend_agg",)
_KERNELS = ("trak_core.projection.cpu.project:load_compiler()",)
_LATER = {
    "average_scores": _TABLES,
    "compute_exact_scores": _TABLES,
    "compute_features": _KERNELS,
    "draw_influences": (*_TABLES, *_FIGURES),
    "retrain": ("pandas",),
    "select_targets": _TABLES,
    "show_list": _FIGURES,
    "write_report": (*_TABLES, *_FIGURES),
}


def stage_of(name: str) -> Callable[..., None]:
    """Return a stage: the function of its module's name."""
    return getattr(importlib.import_module(f"trak_core.stages.{name}"), name)


def convert_param(value: Any, hint: Any) -> Any:
    """Return what Snakemake passes (texts, plain values) as what a stage takes, by its type."""
    kinds = (hint, *typing.get_args(hint))
    if value is None:
        return None
    for spec in (FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec):
        if spec in kinds:
            return parse_spec(spec, value)
    if Path in kinds:
        return Path(value) if isinstance(value, str) else [Path(path) for path in value]
    return int(value) if hint is int else value


def describe_job(job: Any) -> dict[str, Any]:
    """Return what Snakemake's object of a script says of a job, ready for JSON.

    ``own`` holds the names of the rule's own files and params among all that is ``named``.
    """
    named: dict[str, Any] = {"threads": job.threads}
    # What a rule says of its files counts most: a wildcard is named `checkpoint` as well.
    for group in (job.wildcards, job.resources, job.params, job.input, job.output):
        named.update(group.items())
    own = [name for group in (job.params, job.input, job.output) for name in dict(group.items())]
    minutes = job.config["compute"].get("minutes")
    return {"rule": job.rule, "log": job.log[0], "minutes": minutes, "named": named, "own": own}


def imports_of(stages: Iterable[str]) -> list[str]:
    """Return the modules that jobs of some stages import, those that they come to later too.

    A name that ends with ``()`` is that of a function to call.
    """
    modules = {f"trak_core.stages.{stage}": _LATER.get(stage, ()) for stage in stages}
    return [*modules, *dict.fromkeys(module for later in modules.values() for module in later)]


def imports_of_job(job: Mapping[str, Any]) -> list[str]:
    """Return the same of one job, from ``describe_job``."""
    return imports_of([job["named"]["code"].split()[0]])


def run_logged(job: Mapping[str, Any]) -> None:
    """Run a job, from ``describe_job``, with all that it prints in its log."""
    with logged_to(job["log"], job["minutes"]):
        run(job)


def run(job: Mapping[str, Any]) -> None:
    """Call a job's stage with what its rule names, which must be what the stage takes."""
    named = dict(job["named"])
    name, named["code"] = named["code"].split()
    stage = stage_of(name)
    parameters = inspect.signature(stage).parameters
    unknown = set(job["own"]) - parameters.keys() - _TRIGGERS
    if unknown:
        raise TypeError(f"rule {job['rule']} names {', '.join(sorted(unknown))}, not its stage's")
    hints = typing.get_type_hints(stage)
    taken = [name for name in parameters if name in named]
    stage(**{name: convert_param(named[name], hints[name]) for name in taken})
