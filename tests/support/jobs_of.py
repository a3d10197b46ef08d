"""Print the jobs of a config as JSON, with the files and params of their rules.

No job is run. This is a process of its own, and the config is a file in the current folder.
"""

import json
import sys
from pathlib import Path

from snakemake.api import SnakemakeApi
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    OutputSettings,
    Quietness,
    ResourceSettings,
    WorkflowSettings,
)


def named(job):
    """Return the files, params and resources of a job, as its script would get them."""
    groups = {key: getattr(job, key) for key in ("input", "output", "params", "resources")}
    return {
        "rule": job.rule.name,
        "script": job.rule.script,
        "conda": job.rule.conda_env,
        "wildcards": dict(job.wildcards_dict),
    } | {
        key: {name: plain(value) for name, value in group.items()} for key, group in groups.items()
    }


def plain(value):
    if isinstance(value, dict | str | int | float | None):
        return value
    return [plain(item) for item in value]


snakefile, config = map(Path, sys.argv[1:])
with SnakemakeApi(OutputSettings(quiet={Quietness.ALL}, dryrun=True)) as api:
    workflow = api.workflow(
        resource_settings=ResourceSettings(cores=1),
        config_settings=ConfigSettings(configfiles=[config]),
        workflow_settings=WorkflowSettings(),
        snakefile=snakefile,
        workdir=Path.cwd(),
    )
    workflow.dag(DAGSettings()).execute_workflow(executor="dryrun")
    jobs = [named(job) for job in workflow._workflow_store.dag.jobs if job.rule.script]
sys.__stdout__.write(json.dumps(jobs) + "\n")
