"""Versions: the lower bounds are the ones that the gate tests, the pins lie within the ranges."""

import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from test_ptx import PACKAGES
from workspace import REPOSITORY

import trak_core

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PYTHONS = [int(n) for n in re.findall(r":: Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))]


def pins(name):
    lines = (REPOSITORY / name).read_text().splitlines()
    return dict(line.split(";")[0].split("==") for line in lines if "==" in line)


def requirements(*extras):
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][e] for e in extras)]
    return [Requirement(text) for group in groups for text in group]


def test_lower_bounds_are_what_the_gate_installs():
    lowest = pins(".ci/lowest.txt")
    assert lowest.pop("pyparsing")  # matplotlib's own
    extras = requirements("workflow", "cuda")
    bounds = {r.name: s.version for r in extras for s in r.specifier if s.operator == ">="}
    assert bounds.pop("torch") == "2.11"
    assert lowest.pop("torch") == pins("constraints.txt")["torch"]
    assert lowest == bounds


def test_pins_lie_within_the_ranges():
    constraints = {k.lower().replace("_", "-"): v for k, v in pins("constraints.txt").items()}
    for requirement in requirements("workflow", "slurm", "cuda", "test"):
        assert requirement.specifier.contains(constraints[requirement.name]), requirement


def test_the_conda_environment_holds_what_was_tested():
    environment = yaml.safe_load((REPOSITORY / "workflow/envs/trak.yaml").read_text())
    ranges = dict(line.split(" ", 1) for line in environment["dependencies"])
    names = {"matplotlib": "matplotlib-base", "tables": "pytables", "torch": "pytorch"}
    newest = {name.lower(): version for name, version in pins("constraints.txt").items()}
    needed = {r.name: r for r in requirements("workflow") if r.name != "snakemake"}
    assert ranges.pop("python") == f"{PROJECT['requires-python']},<3.{max(PYTHONS) + 1}"
    assert set(ranges) == {names.get(name, name) for name in needed}
    for name, requirement in needed.items():
        lower, upper = ranges[names.get(name, name)].split(",")
        assert lower == str(requirement.specifier)
        assert Requirement(f"{name}{lower},{upper}").specifier.contains(newest[name])


def test_each_python_of_the_classifiers_is_tested():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/gate.yml").read_text())["jobs"]
    (gate,) = (s["with"] for s in jobs["gate"]["steps"] if "setup-python" in s.get("uses", ""))
    tested = [gate["python-version"], *jobs["newest"]["strategy"]["matrix"]["python"]]
    assert tested == [f"3.{n}" for n in PYTHONS]
    assert PROJECT["requires-python"] == f">=3.{PYTHONS[0]}"


def test_the_gpus_compiler_comes_with_the_tests():
    """Otherwise the test of what it makes of the kernels would be skipped in silence."""
    assert set(PACKAGES) <= {requirement.name for requirement in requirements("test")}


def test_the_changelog_and_the_citation_have_this_version():
    assert "## [Unreleased]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", trak_core.__version__)
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == trak_core.__version__
    assert citation["abstract"] == PROJECT["description"]
    assert citation["license"] == PROJECT["license"]


@pytest.mark.parametrize("broken", ["timm", "nothing"])
def test_make_install_ends_with_an_import_of_what_it_installed(broken, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || case "$2" in *{broken}*) exit 1;; esac\n')
    python.chmod(0o755)
    (tmp_path / ".venv/can-run").touch()
    call = ["make", "install", "WITH=vision"]
    result = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode != 0) == (broken == "timm")
    assert (tmp_path / ".venv/has-vision").exists() == (broken == "nothing")
    assert ("WITH=vision installed must be importable" in result.stderr) == (broken == "timm")
