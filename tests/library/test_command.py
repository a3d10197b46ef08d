"""The command `trak`: the call of Snakemake, and errors of wrong calls."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refused import refused

from trak_core.command.main import main
from trak_core.command.run import check_folders, run, snakemake_command, workflow_folder


def test_arguments_are_passed_to_snakemake():
    words = ["scores", "-n", "--config", "scoring={damping: 1}", "--cores", "3"]
    called, snakefile, config, *handed = snakemake_command("a b.yaml", words)
    assert (called, config, handed) == ("snakemake", "--configfile=a b.yaml", words)
    assert snakefile == f"--snakefile={workflow_folder()}/Snakefile"
    for words in (["-c1"], ["--jobs=4"], ["-j", "2"], ["--profile", "mine"]):
        assert snakemake_command("a.yaml", words)[3:] == words
    assert snakemake_command("a.yaml", ["-n"])[3:] == ["-n", "--cores", "all"]


def test_a_profile_is_that_of_the_package_or_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--profile", "slurm", "--profile", "slurm-gpu"]
    profiles = snakemake_command("a.yaml", given)[4::2]
    folders = [workflow_folder().parent / name for name in ("slurm", "slurm-gpu")]
    assert profiles == [str(folder) for folder in folders]
    assert all((folder / "profile.yaml").is_file() for folder in folders)
    assert snakemake_command("a.yaml", ["--profile=slurm"])[3] == f"--profile={folders[0]}"
    (tmp_path / "slurm").mkdir()
    assert snakemake_command("a.yaml", given)[4] == "slurm"


def test_what_is_no_config_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("command.no_config", "scores"):
        run("scores", ["mine.yaml"])
    with refused("command.missing_config", "mine.yaml"):
        run("mine.yaml", [])
    (tmp_path / "mine.yaml").touch()
    with refused("command.second_config", "mine.yaml", workflow_folder() / "Snakefile"):
        run("mine.yaml", ["--configfile=more.yaml"])
    monkeypatch.setattr("trak_core.command.run.find_spec", lambda _: None)
    with refused("command.no_snakemake"):
        run("mine.yaml", [])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="runs on Linux: needs /proc")
def test_folders_that_take_no_file_are_refused_before_snakemake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/caches/mine")
    with refused("command.cache_folder", "/proc/caches/mine"):
        check_folders([])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not/yet"))
    monkeypatch.chdir("/proc")
    with refused("command.working_folder", "/proc"):
        check_folders([])
    check_folders(["--directory=elsewhere"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMP", "/proc")
    monkeypatch.setattr("trak_core.command.run.os.access", lambda *_: True)  # as for root
    with refused("command.temporary_folder", "/proc"):
        check_folders([])


def test_a_folder_takes_a_file_of_some_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with refused("command.working_folder", tmp_path, "No space left on device"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            check_folders([])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_exit_status_and_errors_of_the_command():
    command = [sys.executable, "-m", "trak_core.command.main"]
    for words, status in (([], 0), (["--help"], 0), (["run"], 2), (["walk", "mine.yaml"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == status
    result = subprocess.run([*command, "run", "no.yaml"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: The config must exist. Found nothing at no.yaml")


def test_the_brief_log_is_used_on_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    called = []
    monkeypatch.setattr("os.execv", lambda _, words: called.append(words))
    for words in ([], ["-n"], ["--profile", "slurm"], ["--executor=slurm"]):
        run("mine.yaml", words)
    assert ["--logger=trak" in words[3] for words in called] == [True, True, False, False]
    assert not any("--logger=trak" in words[4:] for words in called)


def test_imports_of_jobs_start_before_snakemake_if_there_are_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trak_core.command.run._can_fork", lambda: True)
    called = []
    monkeypatch.setattr("os.execv", lambda _, words: called.append(words))
    config, record = tmp_path / "mine.yaml", tmp_path / "made" / "config.json"

    def begins(*words):
        """Return whether imports start at once, and whether jobs are forks."""
        run("mine.yaml", words)
        return "start()" in called[-1][3], "--executor=forks" in called[-1]

    config.write_text("{results: made, study: mine.py}")
    (tmp_path / "mine.py").write_text("import xml.dom")
    assert begins("scores") == (True, True)
    assert called[-1][-3] == "--forks-preload=trak_core.runtime.job:import_stages(),xml.dom"
    record.parent.mkdir()
    record.touch()
    assert begins() == (False, True)  # the config has not changed since, so there may be no job
    os.utime(record, (1, 1))
    assert begins() == (True, True)
    for words in (["--profile=slurm"], ["--executor", "slurm"]):
        assert begins(*words) == (False, False)
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "slurm")
    assert begins() == (False, False)


def test_ctrl_c_before_snakemake_reads_the_workflow_is_one_line(tmp_path):
    (tmp_path / "mine.yaml").touch()
    command = [sys.executable, "-m", "trak_core.command.main", "run", "mine.yaml"]
    starting = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert starting.stderr is not None
    assert starting.stderr.readline().startswith("snakemake ")  # then it becomes Snakemake
    starting.send_signal(signal.SIGINT)
    said = starting.communicate(timeout=60)[1]
    assert (starting.returncode, said) == (130, "\nStopped by Ctrl-C before any job began.\n")
