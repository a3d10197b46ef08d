"""The reference that `make docs` writes: every public name is there, with its docstring."""

import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest
from workspace import REPOSITORY

import trak_core


def public_modules():
    """All that has no underscore in its path, but for the pipeline's jobs."""
    for found in pkgutil.walk_packages(trak_core.__path__, "trak_core."):
        inner = found.name.split(".")[1:]
        if not any(part.startswith("_") for part in inner) and inner[0] != "stages":
            yield found.name


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    command = re.search(r"(-m pdoc .*)", (REPOSITORY / "Makefile").read_text()).group(1)
    arguments = shlex.split(command.replace("build/api", str(folder)))
    result = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_public_names_are_described(reference):
    for package in ("artifacts", "gradients", "gramian", "projection", "compat", "spec"):
        module = importlib.import_module(f"trak_core.{package}")
        page = (reference / f"trak_core/{package}.html").read_text()
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                continue
            assert f'id="{name}"' in page, name
            if inspect.isfunction(value) or inspect.isclass(value):
                assert inspect.getdoc(value), name


def test_modules_without_a_list_of_names_are_described_whole(reference):
    for name in (
        *("scoring.scores", "scoring.solve", "scoring.exact", "study.study"),
        *("evaluation.correlations", "evaluation.distortion", "evaluation.baselines"),
        "model_outputs.table",
    ):
        module = importlib.import_module(f"trak_core.{name}")
        page = (reference / f"trak_core/{name.replace('.', '/')}.html").read_text()
        own = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__
        }
        assert own
        for key, value in own.items():
            assert f'id="{key}"' in page, key
            assert inspect.getdoc(value), key


def test_every_module_has_a_page(reference):
    assert len(list(public_modules())) > 20
    for name in public_modules():
        if "." not in name.removeprefix("trak_core."):
            assert (reference / f"{name.replace('.', '/')}.html").exists(), name
