"""The command `trak`: the call of Snakemake, and errors of wrong calls."""

import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from refused import refused

from trak_core.command.main import main
from trak_core.command.run import run, snakemake_command, workflow_folder


@pytest.fixture
def called(monkeypatch):
    """The commands that would replace this process."""
    commands = []
    monkeypatch.setattr("os.execv", lambda _, words: commands.append(words))
    return commands


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["-n"], ["--cores", "all"]),
        *((words, []) for words in (["-c1"], ["--jobs=4"], ["-j", "2"], ["--profile", "mine"])),
        (["scores", "-n", "--config", "scoring={damping: 1}", "--cores", "3"], []),
    ],
)
def test_arguments_are_passed_to_snakemake_which_uses_all_cores_without_a_limit(words, more):
    called, snakefile, config, *handed = snakemake_command("a b.yaml", words)
    assert (called, config, handed) == ("snakemake", "--configfile=a b.yaml", words + more)
    assert snakefile == f"--snakefile={workflow_folder()}/Snakefile"


def test_a_profile_is_that_of_the_package_or_of_the_current_folder(here):
    given = ["--profile", "slurm", "--profile", "slurm-gpu"]
    profiles = snakemake_command("a.yaml", given)[4::2]
    folders = [workflow_folder().parent / name for name in ("slurm", "slurm-gpu")]
    assert profiles == [str(folder) for folder in folders]
    assert all((folder / "profile.yaml").is_file() for folder in folders)
    assert snakemake_command("a.yaml", ["--profile=slurm"])[3] == f"--profile={folders[0]}"
    (here / "slurm").mkdir()
    assert snakemake_command("a.yaml", given)[4] == "slurm"


def test_what_is_no_config_is_refused(here, monkeypatch):
    with refused("command.no_config", "scores"):
        run("scores", ["mine.yaml"])
    with refused("command.no_config", "mine.yaml"):
        run("mine.yaml", [])
    (here / "mine.yaml").touch()
    with refused("command.second_config", "mine.yaml", workflow_folder() / "Snakefile"):
        run("mine.yaml", ["--configfile=more.yaml"])
    monkeypatch.setattr("trak_core.command.run.find_spec", lambda _: None)
    with refused("command.no_snakemake"):
        run("mine.yaml", [])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a: 1\nb: {c: [1, 2}\n", "line 2"),
        (f"a: 1\nb: {1000 * '['}", "recursion depth"),
        (b"a: 1\nb: \xff\n", "0xff"),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(here, called, text, shown):
    """Snakemake would report no line."""
    Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with refused("config.no_yaml", "mine.yaml", re.compile(shown)):
        run("mine.yaml", [])


def test_exit_status_and_errors_of_the_command():
    command = [sys.executable, "-m", "trak_core.command.main"]
    for words, status in (([], 0), (["--help"], 0), (["run"], 2), (["walk", "mine.yaml"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == status
    result = subprocess.run([*command, "run", "no.yaml"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(
        "Error: The first argument of `trak run` must be an existing config"
    )


def test_init_ends_quietly_if_its_reader_has_closed_the_pipe(tmp_path):
    (tmp_path / "train.csv").write_text("a,label\n1,0\n")
    torch.save({"weight": torch.zeros(1, 1)}, tmp_path / "m.pt")
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "trak_core.command.main", "init"]
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
    assert (tmp_path / "trak.yaml").exists()


def test_the_version_is_the_package_s(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"trak-core {version('trak-core')}\n"


def test_the_brief_log_is_used_on_this_machine_only(here, called):
    (here / "mine.yaml").touch()
    for words in ([], ["-n"], ["--profile", "slurm"], ["--executor=slurm"]):
        run("mine.yaml", words)
    assert ["--logger=trak" in words[3] for words in called] == [True, True, False, False]
    assert not any("--logger=trak" in words[4:] for words in called)


def test_jobs_on_this_machine_are_forks_with_the_imports_of_the_study(here, called, monkeypatch):
    monkeypatch.setattr("trak_core.command.run._can_fork", lambda: True)
    (here / "mine.yaml").write_text("{results: made, study: mine.py}")
    (here / "mine.py").write_text("import xml.dom")
    run("mine.yaml", ["scores"])
    assert {"--executor=forks", "--forks-late"} <= set(called[-1])
    assert called[-1][-3] == "--forks-preload=trak_core.runtime.job:import_stages(),xml.dom"
    for words in (["--profile=slurm"], ["--executor", "slurm"]):
        run("mine.yaml", words)
        assert "--executor=forks" not in called[-1]
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "slurm")
    run("mine.yaml", [])
    assert "--executor=forks" not in called[-1]
