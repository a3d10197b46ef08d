"""A study to spoil, and its refusal: in this process, or the one error that Snakemake ends with."""

import multiprocessing
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from own_checkpoints import network
from workspace import REPOSITORY, Workspace, forked_python

from snakemake_executor_plugin_forks.server import start
from trak_core.config.cross_checks import check_paths
from trak_core.config.preflight import run_preflight
from trak_core.config.read_config import check_config, check_unique_keys, with_defaults
from trak_core.config.specs_from_config import Specs
from trak_core.stages.preflight_study import preflight_study

GOOD = {
    "model_output": "regression",
    "checkpoints": {"c0": "c0.pt"},
    "experiments": {"mine": {"targets": ["patient-342"]}},
}

STUDY = "diabetes.py"
SCHEMA = REPOSITORY / "workflow/schemas/config.schema.yaml"


def save_weights(path):
    """A checkpoint that fits the study's model."""
    torch.save({key: torch.zeros_like(v) for key, v in network().state_dict().items()}, path)


def study_to_spoil(folder):
    workspace = Workspace.make(folder, STUDY, GOOD)
    save_weights(workspace.path("c0.pt"))
    return workspace


def as_text(config):
    """The bytes of a config: changes of the good one, or bytes as they are."""
    if isinstance(config, bytes):
        return config
    values = {"study": STUDY, **GOOD, **config}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()


@cache
def _schema():
    return yaml.safe_load(SCHEMA.read_text())


def check(workspace, config):
    """Do with a config what workflow/rules/common.smk does before any job, without Snakemake."""
    text = as_text(config)
    workspace.path("study.yaml").write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        # The process that looks at the study is a fork of this program's; not of the folder's,
        # where tests may end all processes.
        patch.setattr(sys, "executable", forked_python())
        multiprocessing.set_executable(forked_python())
        start()
        patch.chdir(workspace.folder)
        check_unique_keys(Path("study.yaml"))
        values = yaml.safe_load(text)
        check_config(values, _schema())
        values = with_defaults(values, _schema())
        results = Path(values["results"])
        specs = Specs(values, results)
        check_paths(values, ["study.yaml"])
        run_preflight(specs, results, is_stored=False)


def preflight(study_file, splits, **more):
    """Return what a look at a study before any job finds, in this process, as a regression."""
    return preflight_study(
        study_file=study_file,
        weighting="plain",
        parameter_patterns=None,
        training=None,
        splits=splits,
        **({"model_output": "regression"} | more),
    )


def refuse(workspace, config):
    """Try a config under Snakemake, and return the output of the refusal."""
    return workspace.fail("-n", text=as_text(config))


def message(output):
    """Return the text of the one error, and make sure that it is all there is, and the end."""
    for trace in ("Traceback", "Job stats", "jobid", '.smk", line'):
        assert trace not in output, output
    _, *errors = re.split(r"^Error: ", output, flags=re.M)
    assert len(errors) == 1, output
    return " ".join(errors[0].split())
