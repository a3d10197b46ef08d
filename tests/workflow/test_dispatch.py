"""The named values of each rule are arguments of its stage, for configs with all rules."""

import ast
import inspect
import json
import os
import subprocess
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from refusals import GOOD, save_weights
from workspace import REPOSITORY, forked_python

from trak_core.dependency_digests import stage_digest
from trak_core.runtime.job import convert_param, run, stage_module, stage_of
from trak_core.settings import FeaturesSpec, NormalSpec, RetrainedSpec, ScoresSpec

# A stage is a function with only keyword arguments.
STAGES = {
    node.name
    for path in (REPOSITORY / "trak_core/stages").glob("[a-z]*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs and not node.args.args
} - {"preflight_study"}
# Params that only trigger reruns. A stage may take `code`, to write it.
TRIGGERS = {"code", "signature", "digest"}
EXACT = {
    **GOOD,
    "projection": "exact",
    "evaluation": {"ground_truth": "mine.h5"},
    "compute": {"conda": "mine/environment.yaml"},
}


def jobs_of(folder, config):
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    program = REPOSITORY / "tests/support/jobs_of.py"
    result = subprocess.run(
        [forked_python(), program, REPOSITORY / "Snakefile", "study.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


SPECS = (FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """One job of every rule."""
    folder = tmp_path_factory.mktemp("jobs")
    everything = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    everything |= {
        "study": str(REPOSITORY / "config/digits.py"),
        "compute": {"shards": 2},
        "groups": ["label"],
        "answers": {"tokens": True},
        "experiments": everything["experiments"] | {"errors": {"where": "prediction != label"}},
        "lists": {kind: {"experiment": "mix"} for kind in ("suspects", "duplicates")}
        | {"select": {"experiment": "mix", "pool": "unlabelled.py"}},
    }
    everything["evaluation"]["removals"]["suspects"] = {}
    exact = {"study": str(REPOSITORY / "tests/studies/diabetes.py"), **EXACT}
    (folder / "unlabelled.py").write_text("from digits import target_data, target_ids\n")
    save_weights(folder / "c0.pt")
    (folder / "mine.h5").touch()
    return {job["rule"]: job for c in (everything, exact) for job in jobs_of(folder, c)}


def stage(job):
    return stage_of(job["params"]["code"].split()[0])


def test_every_stage_has_a_rule_of_its_name_and_no_rule_is_without(jobs):
    assert {stage(job).__name__ for job in jobs.values()} == STAGES
    assert {job["script"] for job in jobs.values()} == {"../scripts/stage.py"}
    for rule, job in jobs.items():
        assert f"{rule}_".startswith(f"{stage(job).__name__}_")


def test_every_job_has_the_environment_that_the_config_names(jobs):
    folder = {Path(job["conda"]).parent for job in jobs.values() if job["conda"].startswith("/")}
    assert {path.name for path in folder} == {"mine"}
    assert {job["conda"] for job in jobs.values()} == {
        "../envs/trak.yaml",
        f"{folder.pop()}/environment.yaml",
    }


def test_what_a_rule_names_its_stage_takes_and_what_it_must_have_is_there(jobs):
    for rule, job in jobs.items():
        taken = inspect.signature(stage(job)).parameters
        named = {*job["input"], *job["output"], *job["params"]}
        assert named - TRIGGERS <= taken.keys(), rule
        given = named | {*job["wildcards"], *job["resources"], "threads"}
        needed = {p.name for p in taken.values() if p.default is p.empty}
        assert needed <= given, rule


def test_everything_reaches_the_stage_as_what_it_takes(jobs):
    plain = {str, int, float, dict, list, type(None)}
    for rule, job in jobs.items():
        hints = typing.get_type_hints(stage(job))
        for group in ("wildcards", "resources", "params", "input", "output"):
            for name, value in job[group].items():
                if name not in hints:
                    continue
                made = convert_param(value, hints[name])
                kinds = (hints[name], *typing.get_args(hints[name]))
                specs = [k for k in SPECS if k in kinds]
                if made is None:
                    assert type(None) in kinds, (rule, name)
                elif specs:
                    assert type(made) is specs[0], (rule, name)
                    assert made.as_dict() == value
                elif Path in kinds:
                    paths = made if isinstance(made, list) else [made]
                    assert all(isinstance(path, Path) for path in paths), (rule, name)
                else:
                    assert type(made) in plain, (rule, name)


def test_the_code_of_a_job_is_that_of_its_stage(jobs):
    for rule, job in jobs.items():
        name = stage(job).__name__
        assert job["params"]["code"] == f"{name} {stage_digest(stage_module(name))}", rule


def test_a_name_that_the_stage_does_not_take():
    """The stage's default must not replace it silently."""
    job = SimpleNamespace(
        **{key: {} for key in ("wildcards", "resources", "input", "output")},
        **{"rule": "train_checkpoint", "threads": 1, "log": ["log"], "config": {"compute": {}}},
        params={"code": "train_checkpoint 01", "studyfile": "study.py"},
    )
    with pytest.raises(TypeError, match="rule train_checkpoint must have the arguments studyfile"):
        run(job)
