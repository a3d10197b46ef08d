"""docs/how-to/module.md: one workflow for many projects, from other folders, and as a module."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from own_checkpoints import own_study, save_own_checkpoint
from pages import blocks
from workspace import REPOSITORY, artifacts_in, scoring, snakemake
from workspace import jobs as jobs_in

CLONED = ("Snakefile", "workflow", "profiles", "config", "LICENSE")
AS_A_MODULE, FROM_GIT = (text for info, text in blocks("docs/how-to/module.md") if info == "python")
SCORED = scoring(1, 1)


def clone(folder):
    """The workflow in a folder of its own; the library is the one that is installed."""
    for name in CLONED:
        source = REPOSITORY / name
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            folder.mkdir(exist_ok=True)
            shutil.copy2(source, folder / name, follow_symlinks=False)
    return folder


def project(folder):
    """A folder of a user's: study, checkpoint, and the config as plain values."""
    return own_study(folder, 1, ["few"])


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The artifacts of the project run from the repository's own Snakefile."""
    study = project(tmp_path_factory.mktemp("local") / "study")
    assert study.run() == SCORED
    return study.artifacts()


def run(folder, *arguments):
    status, output = snakemake(folder, "--cores", "2", *arguments)
    assert status == 0, output
    return jobs_in(output), output


def test_a_folder_of_its_own_from_either_door(local, tmp_path):
    code, study = clone(tmp_path / "trak-core"), project(tmp_path / "mine")
    study.path("mine.yaml").write_text(yaml.safe_dump(study.config))
    (command,) = (
        re.findall(r"snakemake (--snakefile .*) --cores 2", text)[0].split()
        for info, text in blocks("docs/how-to/module.md")
        if info == "console" and "--directory" in text
    )
    assert run(tmp_path, "scores", *command)[0] == SCORED
    assert study.artifacts() == local
    assert sorted(path.name for path in code.iterdir()) == sorted(CLONED)
    # A profile that is not found would bring back Snakemake's trigger by the time of code.
    for script in (code / "workflow/scripts").iterdir():
        script.touch()
    for door in ("trak-core/Snakefile", "trak-core/workflow/Snakefile"):
        command[command.index("--snakefile") + 1] = door
        ran, output = run(tmp_path, "scores", *command, "--dry-run")
        assert ran == {}, output
        assert "profiles/default" in output


def test_two_modules_with_and_without_a_prefix(local, tmp_path):
    study = project(tmp_path / "mine")
    (study.folder / "trak-core").symlink_to(REPOSITORY)
    second = AS_A_MODULE.replace('config["trak"]', 'config["second"]\n    prefix:\n        "in/it"')
    second = second.replace("trak_*", "second_*").replace("module trak:", "module second:")
    (modules, of_second) = (text.split("rule summary")[0] for text in (AS_A_MODULE, second))
    modules += of_second.split("\n\n\n", 1)[1].replace("from trak", "from second")
    after = AS_A_MODULE[AS_A_MODULE.index("rule summary") :]
    assert "rules.trak_all.input," in after
    scores = "rules.trak_scores.input,\n        rules.second_scores.input,"
    study.path("Snakefile").write_text(modules + after.replace("rules.trak_all.input,", scores))
    config = {"trak": study.config, "second": {**study.config, "scoring": {"damping": 1}}}
    study.path("mine.yaml").write_text(yaml.safe_dump(config))
    ran, output = run(study.folder)
    assert ran == {
        "summary": 1,
        **{f"{name}_{rule}": n for name in ("trak", "second") for rule, n in SCORED.items()},
    }
    assert not re.search(r"warn", output, flags=re.I), output
    assert study.artifacts() == local
    found = artifacts_in(study.path("in/it/results"))
    same = {name for name in local if found[name] == local[name]}
    assert {name for name in local if not name.startswith("scores")} == same
    assert study.path("in/it/results/study.json").exists()
    summary = study.path("summary.txt").read_text().split()
    assert summary == ["in/it/results/scores/few.h5", "results/scores/few.h5"]
    assert run(study.folder, "--dry-run", "--rerun-triggers", "mtime", "params", "input")[0] == {}
    # Own checkpoints are where they are, whatever the prefix, and an older one counts.
    save_own_checkpoint(study, 0, scale=2)
    os.utime(study.path("mine/c0.pt"), (1e9, 1e9))
    assert run(study.folder, "--dry-run", "--rerun-triggers", "mtime", "params", "input")[0] == ran


def test_deployed_and_pinned_to_a_tag(local, tmp_path):
    code = clone(tmp_path / "trak-core")
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@example.org")
    for arguments in (("init",), ("add", "."), ("commit", "-m", "as it is"), ("tag", "v0.3.0")):
        subprocess.run((*git, *arguments), cwd=code, check=True, capture_output=True)
    program = Path(sys.executable).with_name("snakedeploy")
    run_deploy = (program, "deploy-workflow", "trak-core", "mine", "--tag", "v0.3.0")
    subprocess.run(run_deploy, cwd=tmp_path, check=True, capture_output=True)
    deployed = tmp_path / "mine"
    assert {path.name for path in deployed.iterdir()} >= {"config", "profiles", "workflow"}
    snakefile = deployed / "workflow/Snakefile"
    (declared,) = re.findall(r'snakefile:\s+"workflow/Snakefile"', snakefile.read_text())
    (pinned,) = re.findall(r"snakefile:\n +gitfile\(.*\)", FROM_GIT)
    snakefile.write_text(snakefile.read_text().replace(declared, pinned))
    study = project(tmp_path / "project")
    for path in ("diabetes.py", "mine"):
        shutil.move(study.path(path), deployed / path)
    (deployed / "config/config.yaml").write_text(yaml.safe_dump(study.config))
    # What the tag names runs, not what lies there.
    shutil.rmtree(code / "workflow")
    ran, output = run(deployed, "scores")
    assert ran == SCORED, output
    assert artifacts_in(deployed / "results") == local
    assert run(deployed, "--dry-run", "scores")[0] == {}
