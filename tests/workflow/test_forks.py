"""Jobs as forks of a process that has imported everything: same files, and nothing that stays."""

import contextlib
import json
import os
import pty
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
from running import Running, small_study
from snakemake.scheduling.job_scheduler import JobScheduler

from trak_core.system.files import read_record
from trak_core.system.fork_client import Fork, serve_forks
from trak_core.system.job import cancel_timers

TIMES = "results/benchmarks/compute_features/c0"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="jobs are forks on Linux alone")

# What each job says of itself: how it was started, and what it draws without a seed. The preflight
# comes before the logs of jobs.
TELLS = """
import os, __main__
logs = Path("results/logs")
is_early, is_forked = not logs.exists(), "fork_server" in str(__main__.__spec__)
is_fork = is_forked and not is_early
print("fork" if is_fork else "own")
print("draws", np.random.rand())
with open("parents.txt", "a") as parents:
    print("early" if is_early else "job", is_forked, os.getppid(), file=parents)
"""
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
"""


@pytest.fixture
def study(tmp_path):
    study = small_study(tmp_path / "study")
    study.config["compute"] = {"batch_size": 64, "device": "cpu"}
    return study


def tell(study, more=""):
    path = study.path("diabetes.py")
    path.write_text(path.read_text() + TELLS + more)


def told(study):
    """What the two jobs that load the study said, by the words that they said it with."""
    logs = [study.path(f"results/logs/compute_features/c0/{s}.log") for s in ("train", "few")]
    texts = [log.read_text() for log in logs]
    return [
        [re.search(rf"^{words}", t, re.MULTILINE)[0] for t in texts]
        for words in ("(fork|own)$", "draws .*")
    ]


def servers_in(folder):
    """The product's of one run, by its environment; the tests' own imports `forked_python` too."""
    servers = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "trak_core.system.fork_server" not in command or "forked_python" in command:
                continue
            if process.environ().get("STUDY_OF_TEST") == str(folder):
                servers.append(process)
    return servers


@pytest.fixture
def marked(study, monkeypatch, tmp_path):
    """The study, whose processes can be told from others', with its own temporary folder."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("STUDY_OF_TEST", str(study.folder))
    return study


def of_ours(study):
    """What a run left in the temporary folder, beside what Snakemake leaves."""
    left = (study.folder.parent / "temporary").iterdir()
    return [path.name for path in left if not path.name.startswith("snakemake")]


def gone(folder):
    """Wait until nothing is left of a run."""
    for _ in range(100):
        if not servers_in(folder):
            return True
        time.sleep(0.1)
    return False


def test_forked_jobs_leave_the_same_files(marked):
    """Snakemake and its jobs as a user has them; `--no-hooks` starts every job by itself."""
    tell(marked)
    status, output = marked.snakemake("--dry-run")
    assert status == 0, output
    assert "\nReport: " not in output
    shutil.rmtree(marked.path("results"))  # what the preflight has found
    marked.path("parents.txt").unlink()
    given = ("--config", "compute={threads: 1}")
    status, output = marked.snakemake("scores", *given, python=sys.executable)
    assert status == 0, output
    # What `trak ask` goes by.
    record = read_record(marked.path("results/config.json"))
    assert record["by_command"] == {"compute": {"threads": 1}}
    assert record["config_files"] == ["study.yaml"]
    assert "\nScores: results/scores/few.h5\n" in output
    assert "\nReport: " not in output  # it was not asked for
    forked = marked.artifacts()
    assert gone(marked.folder)
    assert of_ours(marked) == []
    who, draws = told(marked)
    assert who == ["fork", "fork"]
    assert len(set(draws)) == 2
    # No Python was started to wait for one, and what Snakemake measures is the job.
    assert not marked.path(".snakemake/scripts").exists()
    (row,) = pd.read_csv(marked.path(f"{TIMES}/train.tsv"), sep="\t").to_dict("records")
    assert row["s"] >= 0.5
    assert row["max_rss"] >= 100
    # The preflight is a fork of the same process, which imports everything once.
    early, *others = [line.split() for line in marked.path("parents.txt").read_text().splitlines()]
    assert {tuple(other) for other in others} == {("job", *early[1:])}
    assert early[:2] == ["early", "True"]
    status, output = marked.snakemake("--no-hooks", "--forceall", "scores")
    assert status == 0, output
    assert told(marked)[0] == ["own", "own"]
    assert marked.artifacts() == forked


@pytest.mark.parametrize(
    ("beside", "compute"),
    # A thread would be gone in a fork, and what it holds never be let go; no job waits for its end.
    # Libraries look at how many threads they may have when they are imported.
    [(THREAD, {}), ("", {"threads": 2})],
)
def test_some_jobs_cannot_be_forks(study, beside, compute, tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "beside.py").write_text(beside)
    # From the user's folder, which isn't the server's; where the server must not see it.
    relative = os.path.relpath(installed, study.folder)
    monkeypatch.setenv("PYTHONPATH", relative if compute else str(installed))
    study.config["compute"] |= compute
    tell(study, "import beside\n")
    assert study.run()["compute_features"] == 2
    assert told(study)[0] == ["own", "own"]


LAZY = """
def make_model():
    import tabnanny  # which nothing else of a study does
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
"""


def test_a_preflight_that_takes_its_server_along_begins_again(study):
    tell(study, f"if is_early and is_forked: os.kill(os.getppid(), 9)\n{LAZY}")
    study.run()
    assert told(study)[0] == ["fork", "fork"]
    lines = study.path("parents.txt").read_text().splitlines()
    assert [" ".join(line.split()[:2]) for line in lines[:2]] == ["early True", "early False"]
    # The next run's server imports what the study comes to.
    record = study.path("results/study.json")
    assert "tabnanny" in read_record(record)["imports"]
    code = study.path("diabetes.py")
    code.write_text(code.read_text().replace("import tabnanny", "pass"))
    study.would_run()
    assert "tabnanny" not in read_record(record)["imports"]


def test_an_error_reads_as_that_of_any_job(study):
    # Only there: the look over the study before the first job would find it.
    tell(study, "if is_fork: raise ValueError('of mine')\n")
    output = study.fail()
    assert "ValueError: of mine" in output
    log = study.path("results/logs/compute_features/c0/train.log").read_text()
    assert log.startswith("fork\n")
    assert "must end without an error. Found ValueError: of mine" in log


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_crash_is_a_failed_job(study, name):
    """Its log says what no process that is killed can say; only SIGKILL means lack of memory."""
    tell(study, f"import signal\nif is_fork: os.kill(os.getpid(), signal.{name})\n")
    output = study.fail()
    (told,) = {line for line in output.splitlines() if line.startswith("Error: the job must end")}
    assert f" {name}" in told
    assert ("compute.memory_mb" in told) is (name == "SIGKILL")
    assert "Error in rule compute_features" in output
    assert not list(study.path("results").glob("features/**/*.h5"))


@pytest.mark.parametrize("victim", ["snakemake", "server", "all, by Ctrl-C"])
def test_nothing_stays_when_snakemake_or_the_server_is_killed(marked, victim):
    tell(marked, "import time\nprint(end='', flush=True)\ntime.sleep(100 * is_fork)\n")
    run = Running(marked, "scores")
    log = marked.path("results/logs/compute_features/c0")
    run.wait_for(lambda: [one for one in log.glob("*.log") if "fork" in one.read_text()])
    (server,) = [one for one in servers_in(marked.folder) if one.ppid() == run.process.pid]
    if victim == "server":
        server.kill()
        assert run.finish() == 1
        assert "The process that forks for jobs has ended" in run.output
    elif victim == "snakemake":
        run.process.kill()
        run.process.wait()
    else:
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish() != 0
    assert gone(marked.folder)
    assert of_ours(marked) == []
    (said,) = [one.read_text() for one in log.glob("*.log")]
    # Its own session's Ctrl-C reaches a job as it would reach any.
    assert f"told to stop ({'SIGINT' if victim[:3] == 'all' else 'SIGTERM'})" in said
    assert not list(marked.path("results").rglob("*.part"))


CROWD = """
import os, resource
kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]

def check_limit(limit):
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit
"""


def status_of(name, function, argument, signals=b""):
    """Ask a server for a fork, with signals that come at once."""
    text = json.dumps({"folder": "/", "call": [function, argument]}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(f"\0{name}")
        socket.send_fds(connection, [struct.pack("!Q", len(text))], [0, 1, 2])
        connection.sendall(text + signals)
        assert connection.recv(1) == b"y"
        process, status = (struct.unpack("!i", connection.recv(4))[0] for _ in range(2))
        assert process > 1
        return status


def test_a_server_has_room_for_many_jobs_and_no_signal_is_lost(tmp_path, monkeypatch):
    """More files than `select` takes, and than a process may open that raises no limit."""
    (tmp_path / "crowd.py").write_text(CROWD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        name, server = serve_forks(["numpy", "crowd"])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server:
        assert status_of(name, "crowd:check_limit", 1024) == 0
        for _ in range(20):
            assert status_of(name, "time:sleep", 60, bytes([signal.SIGTERM])) == -signal.SIGTERM


ASKS = """
import os, sys

def ask(way):
    assert "/" not in sys.path  # whose folders would be packages
    try:
        input() if way == "input" else open("/dev/tty")
    except (EOFError, OSError):
        os._exit(7)
"""


@pytest.mark.parametrize("way", ["input", "tty"])
def test_a_question_to_the_terminal_has_no_answer(way, tmp_path, monkeypatch):
    """A process in its background would stop where it asks, and none would go on."""
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}")
    process, terminal = pty.fork()
    if process == 0:
        status = 1
        try:
            name, _ = serve_forks(["numpy"])
            request = {"folder": "/", "call": ["asks:ask", way]}
            with contextlib.suppress(TimeoutError), Fork(name, request) as fork:
                status = fork.status(20)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    os.close(terminal)


def test_jobs_pause_with_snakemake_and_go_on_with_it():
    """Ctrl-Z tells the server what it tells Snakemake."""
    name, server = serve_forks(["numpy"])
    with server, Fork(name, {"folder": "/", "call": ["time:sleep", 60], "hears": True}) as fork:
        pair = psutil.Process(server.pid), psutil.Process(fork.process())
        for number, wanted in ((signal.SIGTSTP, "stopped"), (signal.SIGCONT, "sleeping")) * 2:
            server.send_signal(number)
            for _ in range(200):
                if {one.status() for one in pair} == {wanted}:
                    break
                time.sleep(0.05)
            assert [one.status() for one in pair] == [wanted, wanted]


def test_a_server_imports_what_it_is_told_to(tmp_path, monkeypatch):
    """For a request before its fork; else when it has time, one module after another."""
    for name in ("early", "late", "bad"):
        text = f"open({str(tmp_path / name)!r}, 'x').close()\n"
        (tmp_path / f"{name}_module.py").write_text(text + "1 / 0\n" * (name == "bad"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    name, server = serve_forks(["numpy"])
    with server:
        request = {"folder": "/", "call": ["time:sleep", 0.01], "imports": ["early_module"]}
        for _ in range(2):
            with Fork(name, request) as fork:
                assert fork.status(20) == 0
        assert (tmp_path / "early").exists()
        with Fork(name, {"imports": ["bad_module", "no_module", "late_module"]}):
            for _ in range(200):
                if (tmp_path / "late").exists():
                    break
                time.sleep(0.1)
        assert (tmp_path / "bad").exists()
        with Fork(name, {"folder": "/", "call": ["late_module:no", 1]}) as fork:
            assert fork.status(20) == 1
        with Fork(name, {"folder": "/", "call": ["time:sleep", 60]}) as fork:
            with pytest.raises(TimeoutError):
                fork.status(0.2)
            (child,) = psutil.Process(server.pid).children()
        assert child.wait(20) is None or not child.is_running()


def bad_requests():
    deep = b'{"call": ' + b"[" * 10**5
    texts = [b"{}", b"[]", b"no JSON", deep, b'{"folder": 1, "call": ["a", 2]}', b"\xff"]
    texts += [b'{"imports": 1}', b'{"imports": [1]}', b'{"environment": {"a": "b"}}']
    yield from (struct.pack("!Q", len(text)) + text for text in texts)
    yield from (struct.pack("!Q", size) + b"{" for size in (2**63, 2**40, 2**24 + 1))


def test_a_server_outlives_every_request_and_waits_for_nobody():
    name, server = serve_forks(["numpy"])
    with server, contextlib.ExitStack() as stack:
        for text in bad_requests():
            with socket.socket(socket.AF_UNIX) as bad:
                bad.settimeout(20)
                bad.connect(f"\0{name}")
                bad.sendall(text)
                with contextlib.suppress(ConnectionResetError):  # it has not read all
                    assert bad.recv(1) == b""
        # Clients that stop half way, as a paused job does, with streams that no fork may keep.
        reading, writing = os.pipe()
        for text in (b"", b"\0" * 3, struct.pack("!Q", 99), struct.pack("!Q", 99) + b"{"):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(f"\0{name}")
            if text:
                socket.send_fds(silent, [text], [writing])
        os.close(writing)
        assert status_of(name, "time:sleep", 0.01) == 0
        stack.close()
        assert os.read(reading, 1) == b""  # the server has closed what the silent ones gave
        os.close(reading)
        assert status_of(name, "time:sleep", 0.01) == 0


def test_the_client_imports_no_library():
    code = "import sys, trak_core.system.fork_client; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "h5py", "numba", "pandas"} & set(found.stdout.split())


EARLY = """
import os, sys
from trak_core.system.fork_client import start_early
start_early(["json"])
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""
LATE = """
import json, os, sys, time
from trak_core.system import fork_client as client
name, _, process, *_ = json.loads(os.environ[client._EARLY])
os.environ |= json.loads(sys.argv[2])
client.take_over_early(forks=json.loads(sys.argv[1]))
own = client.start_fork_server(["json"])
deadline = time.monotonic() + 30
ends = process == os.getpid() and own != name
while ends and client._send(name, {"imports": []}) and time.monotonic() < deadline:
    time.sleep(0.01)
alive = client._send(name, {"imports": []}) is not None
given = {**os.environ, **client.ONE_THREAD, client.SOCKET: own}
with client.Fork(own, {"folder": "/", "call": ["time:sleep", 0], "environment": given}) as fork:
    print(own == name, alive, client._EARLY in os.environ, fork.begins())
"""
OTHERS = EARLY.replace("os.execv(sys.executable, ", "import subprocess\nsubprocess.run(")


@pytest.mark.parametrize(
    ("early", "forks", "more", "before"),
    [
        (EARLY, True, {}, {}),
        (EARLY, False, {}, {}),
        (EARLY, True, {"COLOUR": "red"}, {}),
        # All that the system takes as one variable; what another run has left.
        (EARLY, True, {}, {"LONG": '"' * 120_000}),
        (EARLY, True, {}, {"TRAK_CORE_EARLY_SERVER": '["trak-0", 9, 1, ""]'}),
        # The server of a process that this one is not.
        (OTHERS, True, {}, {}),
    ],
)
def test_snakemake_takes_over_a_server_of_before_or_ends_it(early, forks, more, before):
    """It has none whose imports saw another environment."""
    words = [sys.executable, "-c", early, LATE, json.dumps(forks), json.dumps(more)]
    result = subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=60, env=os.environ | before
    )
    is_same = early == EARLY and forks and not more
    is_alive = is_same or early == OTHERS
    assert result.stdout.split() == [str(is_same), str(is_alive), "False", "True"], result.stderr


def test_snakemake_s_own_timers_are_not_waited_for():
    scheduler = SimpleNamespace(_open_jobs=threading.Semaphore(0))
    JobScheduler._schedule_reevalutation(scheduler, 3600)
    others = [threading.Timer(3600, function) for function in (print, [].append)]
    for other in others:
        other.start()
    timers = (t for t in threading.enumerate() if isinstance(t, threading.Timer))
    (timer,) = (t for t in timers if t not in others)
    cancel_timers()
    timer.join(10)
    assert not timer.is_alive()
    for other in others:
        assert other.is_alive()
        other.cancel()
        other.join(10)
