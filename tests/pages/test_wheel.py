"""The built wheel, installed beside its dependencies: what who has no checkout gets."""

import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from own_checkpoints import network
from pages import blocks
from workspace import REPOSITORY

import trak_core
from trak_core.dependency_digests import stage_digest
from trak_core.projection import project
from trak_core.settings import ProjectionKind, ProjectionSpec

SOURCE = REPOSITORY / "trak_core"
# The folders of the workflow, and where a wheel has them.
WORKFLOW = {
    "workflow": "trak_core/workflow",
    "local": "trak_core/workflow/profiles/local",
    "slurm": "trak_core/workflow/profiles/slurm",
    "slurm-gpu": "trak_core/workflow/profiles/slurm-gpu",
}
PLUGINS = ("snakemake_executor_plugin_forks", "snakemake_logger_plugin_trak")
STAGE = "trak_core.stages.compute_features"
# What the editable install of the tests' own environment consists of.
OURS = ("trak_core", *PLUGINS, "__editable__", "__pycache__")
MODULES = """
import importlib, pathlib, pkgutil, sys
import trak_core
assert pathlib.Path(trak_core.__file__).is_relative_to(sys.prefix), trak_core.__file__
for module in pkgutil.walk_packages(trak_core.__path__, "trak_core."):
    importlib.import_module(module.name)
    print(module.name)
"""
USE = f"""
import numpy as np
from trak_core.projection import project
from trak_core.dependency_digests import stage_digest
from trak_core.settings import ProjectionSpec
spec = ProjectionSpec(kind="rademacher", n_params=3, proj_dim=4, seed=0, stream=0)
print(*project(np.float32([[1, 2, 3]]), spec)[0], stage_digest({STAGE!r}))
"""
NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
"""
PROFILE = """
from trak_core.command.run import snakemake_command
print(snakemake_command("mine.yaml", ["--profile", "slurm"])[-1])
"""


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from what the repository says that it is built from, without the network."""
    source = tmp_path_factory.mktemp("source")
    (source / "docs").mkdir()
    for name in ("pyproject.toml", "setup.py", "docs/package.md", "LICENSE"):
        shutil.copy2(REPOSITORY / name, source / name)
    for name in ("trak_core", *PLUGINS, *WORKFLOW):
        unused = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, ignore=unused)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "--wheel-dir", source / "out", source)
    (built,) = (source / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Return the interpreter of an environment with the wheel, and the rest as it is here.

    Its path is one that a shell cuts.
    """
    folder = tmp_path_factory.mktemp("environment") / "für alle/env"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    installed = run(python, "-Ic", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS):
            Path(installed, entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    run(*pip, "--no-deps", "--no-index", wheel)
    return python


def isolated(python, code, folder):
    """Run code where nothing but the environment says what is imported."""
    return run(python, "-Ic", code, cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)})


def test_the_wheel_holds_every_file_of_package_and_workflow(wheel):
    files = {
        f"{inside}/{path.relative_to(REPOSITORY / folder)}"
        for folder, inside in ({name: name for name in ("trak_core", *PLUGINS)} | WORKFLOW).items()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyi"
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == files
    assert "trak_core/py.typed" in files


def test_its_modules_its_numbers_and_its_digests_are_those_of_the_checkout(python, tmp_path):
    *names, used = isolated(python, MODULES + USE, tmp_path).splitlines()
    assert {name.split(".")[1] for name in names} == {
        path.stem
        for path in SOURCE.iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")
    }
    *row, digest = used.split()
    spec = ProjectionSpec(kind=ProjectionKind.RADEMACHER, n_params=3, proj_dim=4, seed=0, stream=0)
    assert [float(entry) for entry in row] == project(np.float32([[1, 2, 3]]), spec)[0].tolist()
    assert digest == stage_digest(STAGE)


def test_studies_run_where_nothing_but_the_wheel_is(python, tmp_path):
    """One by hand, with a target; and by `trak init` and `trak run` alone the same as a table."""
    shutil.copy2(REPOSITORY / "tests/studies/diabetes.py", tmp_path)
    targets = [f"patient-{i}" for i in (342, 343, 344)]
    config = {"study": "diabetes.py", "model_output": "regression"}
    config |= {"checkpoints": {"c0": "c0.pt"}, "experiments": {"one": {"targets": targets}}}
    config |= {"compute": {"threads": 2}}  # so that some jobs are no forks
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    torch.save(network().state_dict(), tmp_path / "c0.pt")
    (own := tmp_path / "own").mkdir()
    shutil.copy2(tmp_path / "c0.pt", own)
    (own / "nets.py").write_text(NET)
    study = runpy.run_path(str(tmp_path / "diabetes.py"))
    rows = pd.DataFrame(study["x"].numpy()).assign(label=study["y"].numpy())
    rows[:342].to_csv(own / "train.csv", index=False)
    rows[342:].to_csv(own / "test.csv", index=False)

    def trak(*words, folder=own):
        """Return what `trak` says, where the environment says nothing more than it must."""
        given = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        result = subprocess.run(
            [python.with_name("trak"), *words],
            **{"cwd": folder, "env": given, "capture_output": True, "text": True, "check": False},
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    called = trak("run", "mine.yaml", "scores", "--keep-going", folder=tmp_path).splitlines()[0]
    snakefile = f"--snakefile={python.parents[1]}/lib/.*/site-packages/trak_core/workflow/Snakefile"
    pattern = rf"snakemake '{snakefile}' --configfile=mine.yaml scores --keep-going .*--cores all"
    assert re.fullmatch(pattern, called), called
    # A cluster's profile is the wheel's, which holds what the repository does.
    folder = isolated(python, PROFILE, tmp_path).strip()
    assert Path(folder).is_relative_to(python.parents[1])
    profile = Path(folder, "profile.yaml").read_text()
    assert profile == (REPOSITORY / "slurm/profile.yaml").read_text()
    trak("init")
    trak("run", "trak.yaml", "scores")
    scores = [
        pd.read_hdf(results / f"scores/{name}.h5", "scores")
        for results, name in ((tmp_path / "results", "one"), (own / "results-trak", "asked"))
    ]
    assert scores[0].shape == (342, 3)
    largest = np.abs(scores[0].to_numpy()).max()
    assert np.abs(scores[1].to_numpy() - scores[0].to_numpy()).max() <= 1e-6 * largest
    assert "pushed it up:" in trak("ask", "trak.yaml", "-t", "0")


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="runs in a checkout of git")
def test_a_release_is_the_repository_and_a_package_index_takes_it(wheel, tmp_path):
    """As `make release` builds both; what git doesn't know here is left out of the copy."""
    tracked = run("git", "ls-files", cwd=REPOSITORY).splitlines()
    copy = tmp_path / "copy"
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, copy / name, follow_symlinks=False)
    (copy / ".venv").symlink_to(sys.prefix)
    made_already = (f"--assume-old=.venv/{name}" for name in ("can-run", "can-test"))
    run("make", *made_already, "release", cwd=copy)
    made = {path.name.removeprefix("trak_core-"): path for path in (copy / "dist").iterdir()}
    version = trak_core.__version__
    assert set(made) == {f"{version}.tar.gz", f"{version}-py3-none-any.whl"}
    with tarfile.open(made[f"{version}.tar.gz"]) as archive:
        held = {member.name.partition("/")[2] for member in archive.getmembers()}
    assert set(tracked) - held == set()
    with (
        zipfile.ZipFile(made[f"{version}-py3-none-any.whl"]) as ours,
        zipfile.ZipFile(wheel) as known,
    ):
        assert ours.namelist() == known.namelist()


def test_the_packages_page_leads_nowhere_that_is_not_there(wheel, tmp_path):
    page = (REPOSITORY / "docs/package.md").read_text()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        assert page in archive.read(name).decode()
    assert not re.search(r"\]\((?!https://)", page)
    ((_, code),) = blocks("docs/package.md")
    exec(code, names := {})
    assert names["features"].shape == (100, 512)
