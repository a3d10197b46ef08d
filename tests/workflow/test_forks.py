"""The executor plugin `forks`, on workflows that know nothing of the library."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pandas as pd
import patience
import psutil
import pytest
from workspace import snakemake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scripts are forks on Linux alone")
SNAKEFILE = """
rule all:
    input: expand("{i}.json", i=range(N))

rule tell:
    output: "{i}.json"
    log: "{i}.log"
    benchmark: "{i}.tsv"
    threads: THREADS
    params: spec={"a": 1}
    script: "tell.py"
"""
# A module to import ahead, and what a script can see of how it runs.
AHEAD = "import os\nIMPORTED_BY = os.getpid()\n"
TELL = """
import json, os, random, sys, tempfile
import numpy as np
import ahead
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TMPDIR", "TEMP", "SAID", "PYTHONSAFEPATH")
told = {
    "environment": {name: os.environ.get(name) for name in names},
    "folder": os.getcwd(), "temporary": tempfile.gettempdir(), "paths": sys.path,
    "arguments": sys.argv, "main": __name__, "file": __file__, "python": sys.executable,
    "params": snakemake.params.spec, "log": snakemake.log[0], "group": os.getpgrp(),
}
told = {"all": told, "is_fork": ahead.IMPORTED_BY != os.getpid(), "draws": np.random.rand()}
json.dump(told, open(snakemake.output[0], "w"))
"""


def write(folder, script=TELL, n=1, threads=1, ahead=AHEAD, more=""):
    """Write a workflow of ``n`` scripts."""
    (folder / "ahead.py").write_text(ahead)
    (folder / "tell.py").write_text(script)
    text = f"N = {n}\nTHREADS = {threads}\n{more}{SNAKEFILE}"
    (folder / "Snakefile").write_text(text)
    return folder


def run(folder, executor="forks", *words, preload="ahead", **options):
    """Return the exit status and what Snakemake said."""
    ways = {"forks": ("--executor", "forks", f"--forks-preload={preload}"), "local": ()}
    call = ("--cores", "2", "--forceall", "--default-resources", f"tmpdir={str(folder)!r}")
    return snakemake(folder, *call, *ways[executor], *words, **options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


def told(folder, i=0):
    return json.loads((folder / f"{i}.json").read_text())


def test_a_script_sees_what_it_sees_under_the_local_executor(folder):
    write(folder, n=2)
    seen = []
    for executor in ("local", "forks"):
        status, output = run(folder, executor)
        assert status == 0, output
        said = told(folder)
        assert said["is_fork"] is (executor == "forks")
        text = re.sub(r"\btmp\w+", "", json.dumps(said["all"]))
        seen.append(json.loads(text) | {"group": None})
        assert seen[-1]["environment"]["OMP_NUM_THREADS"] == "1"
        assert told(folder, 0)["draws"] != told(folder, 1)["draws"]
        (row,) = pd.read_csv(folder / "0.tsv", sep="\t").to_dict("records")
        assert row["s"] > 0
    assert seen[0] == seen[1]


THREAD = AHEAD + "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"


@pytest.mark.parametrize(
    "given",
    [
        {"threads": 2},  # how many is read when libraries are imported
        {"ahead": THREAD.replace("args=(60,)", "args=(60,), daemon=True")},
        {"more": "onstart: __import__('os').environ['SAID'] = 'late'\n"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_where_a_fork_could_differ_a_script_has_its_own_python(given, folder):
    write(folder, **given)
    status, output = run(folder)
    assert status == 0, output
    said = told(folder)
    assert said["is_fork"] is False
    assert said["all"]["environment"]["OMP_NUM_THREADS"] == str(given.get("threads", 1))
    assert said["all"]["environment"]["SAID"] == ("late" if "more" in given else None)
    assert said["all"]["environment"]["PYTHONSAFEPATH"] is None


# Lines that tell runs apart.
OF_THE_RUN = re.compile(r" *(Workflow ID|Command|PID|resources)")


@pytest.mark.parametrize("end", ["raise ValueError('of mine')", "exit('of mine')", "exit(3)"])
def test_a_failure_reads_as_under_the_local_executor(end, folder):
    write(folder, f"import atexit\natexit.register(print, 'the end', flush=True)\n{end}\n")
    texts = []
    for executor in ("local", "forks"):
        status, output = run(folder, executor, python=sys.executable)
        assert status == 1
        text = re.sub(r"\btmp\w+|\d\d:\d\d:\d\d", "", output.split("RuleException")[0])
        texts.append([line for line in text.splitlines() if not OF_THE_RUN.match(line)])
    assert texts[0] == texts[1]
    assert any("the end" in line for line in texts[0])
    assert any("of mine" in line for line in texts[0]) == ("of mine" in end)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_what_has_ended_a_script_is_told(name, folder):
    write(folder, f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    status, output = run(folder)
    assert status == 1
    (line,) = {line for line in output.splitlines() if "was ended by" in line}
    assert f" {name}" in line
    assert ("memory" in line) is (name == "SIGKILL")
    assert "Error in rule tell" in output


WAITS = "import time\nopen(snakemake.output[0] + '.began', 'x').close()\ntime.sleep(600)\n"


@pytest.mark.parametrize("way", ["Ctrl-C", "kill"])
def test_nothing_stays_of_a_snakemake_that_ends(way, folder):
    write(folder, WAITS, n=2)
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--executor", "forks"]
    started = subprocess.Popen(
        command,
        cwd=folder,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(int(patience.longer(6000))):
        if len([*folder.glob("*.began")]) == 2:
            break
        assert started.poll() is None
        time.sleep(0.01)
    children = psutil.Process(started.pid).children(recursive=True)
    assert len(children) >= 3  # the server and two scripts
    if way == "kill":
        started.kill()
    else:
        os.killpg(started.pid, signal.SIGINT)
    started.communicate(timeout=patience.longer(60))
    _, alive = psutil.wait_procs(children, timeout=patience.longer(20))
    assert alive == []


def test_a_server_that_is_killed_takes_its_scripts_along(folder):
    ends = "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(600)\n"
    write(folder, ends)
    status, output = run(folder)
    assert status == 1
    assert "Error in rule tell" in output
    assert "non-zero exit status 255" in output
