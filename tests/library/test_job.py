import re
import subprocess
import sys

import pytest

from trak_core.system import progress as blocks
from trak_core.system.progress import blocks_with_progress


def run(body, log):
    code = (
        f"from trak_core.system.job import logged_to\nwith logged_to({str(log)!r}):\n    {body}\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_everything_goes_to_the_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("of an earlier run")
    result = run("import os; print('python'); os.system('echo child; echo error >&2')", log)
    assert result.returncode == 0
    assert result.stdout == result.stderr == ""
    *said, last = log.read_text().splitlines()
    assert sorted(said) == ["child", "error", "python"]
    assert re.fullmatch(r"peak memory: [1-9]\d* MiB", last)


def test_an_error_may_name_a_file_whose_name_is_no_text(tmp_path):
    log = tmp_path / "a.log"
    body = "from trak_core.errors import InputError; raise InputError('\\udce9.h5', code='a.b')"
    assert run(body, log).returncode == 1
    assert log.read_text() == "Error: \\udce9.h5\n"


WARNED = """import os, warnings, numpy, trak_core
    warnings.simplefilter('always')
    for name, module in (('python', os), ('numpy', numpy), ('ours', trak_core)):
        for kind in (DeprecationWarning, FutureWarning, PendingDeprecationWarning, UserWarning):
            warnings.warn_explicit(f'by {name}', kind, module.__file__, 1)
    warnings.warn('by the study', FutureWarning)
    print(*(os.environ[f'HF_{n}_DISABLE_PROGRESS_BARS'] for n in ('HUB', 'DATASETS')))
"""


def test_what_libraries_tell_their_developers_is_left_out(tmp_path, monkeypatch):
    """Bars, and warnings of a future version about their own code; what the user set stays."""
    log = tmp_path / "a.log"
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "0")
    assert run(WARNED, log).returncode == 0
    text = log.read_text()
    found = re.findall(r"(\w+): by (\w+)", text)
    ours = ["DeprecationWarning", "FutureWarning", "PendingDeprecationWarning", "UserWarning"]
    assert found == [
        ("UserWarning", "python"),
        ("UserWarning", "numpy"),
        *((kind, "ours") for kind in ours),
        ("FutureWarning", "the"),
    ]
    assert text.splitlines()[-2] == "1 0"
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    assert run(WARNED, log).returncode == 0
    assert "FutureWarning: by numpy" in log.read_text()


def test_an_input_error_is_one_message_and_a_defect_keeps_its_traceback(tmp_path):
    log = tmp_path / "a.log"
    body = "from trak_core.errors import InputError; raise InputError('what to do')"
    assert run(body, log).returncode == 1
    assert log.read_text() == "Error: what to do\n"
    assert run("raise KeyError('x')", log).returncode == 1
    assert "Traceback" in log.read_text()


STOPPED = """
import atexit, ctypes, os, signal, time
from pathlib import Path
from trak_core.system.files import written_whole
from trak_core.system.job import logged_to

def told():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(3):  # where Python looks for signals
        pass

class Dropped:
    def __del__(self):
        told()

def in_callback():
    ctypes.CFUNCTYPE(None)(told)()

def in_a_study():
    try:
        told()
    except BaseException:
        pass

def slowly(name):
    time.sleep(0.7)
    Path(name).touch()

atexit.register(slowly, "ended")
with logged_to("a.log"):
    with written_whole(Path("half.h5")) as partial:
        partial.touch()
        try:
            {where}()
            time.sleep(30)
            print("went on")
        finally:
            try:
                os.unlink("nothing")
            except FileNotFoundError:
                slowly("cleared")
"""


WHERE = ("told", "Dropped", "in_callback", "in_a_study")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Jobs that are told to stop, each in a folder: all at once, since most of them wait."""
    jobs = {}
    for where in WHERE:
        command = [sys.executable, "-c", STOPPED.replace("{where}", where)]
        folder = tmp_path_factory.mktemp(where)
        jobs[where] = subprocess.Popen(command, cwd=folder), folder
    yield jobs
    for job, _ in jobs.values():
        job.kill()
        job.wait()


@pytest.mark.parametrize("where", WHERE)
def test_a_stop_is_not_lost_where_python_drops_what_is_raised(where, stopped):
    """The job ends soon, with its one sentence; what clears up after it has its time."""
    job, folder = stopped[where]
    job.wait(timeout=20)
    (line,) = (folder / "a.log").read_text().splitlines()
    assert line.startswith("Error: the job was told to stop (SIGTERM), as when")
    assert {path.name for path in folder.iterdir()} == {"a.log", "cleared", "ended"}


LATE = """
import ctypes, sys, time
from pathlib import Path
from trak_core.system import job
from trak_core.system.files import written_whole
job._CLEARING_SECONDS = 0.5
def work():
    with job.logged_to("a.log", {minutes}), written_whole(Path("a.h5")) as partial:
        partial.touch()
        {hang}
job.run_to_the_end(work)
"""


@pytest.mark.parametrize(
    ("hang", "minutes", "left"),
    [
        ("time.sleep(600)", 0.005, {"a.log"}),
        # No Python runs in the main thread: what it has begun stays for the next job to delete.
        ("ctypes.CDLL(None).select(0, None, None, None, None)", 0.005, None),
        ("pass", 0.05, {"a.log", "a.h5"}),
    ],
)
def test_a_job_ends_within_its_minutes(hang, minutes, left, tmp_path):
    code = LATE.format(hang=hang, minutes=minutes)
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, timeout=60, check=False)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == left if left else "a.h5" not in names
    (line,) = (tmp_path / "a.log").read_text().splitlines()
    is_late = hang != "pass"
    assert found.returncode == int(is_late)
    assert line.startswith("Error: a job must end within compute.minutes, 0.005. It") == is_late


ENDS = """
import atexit, threading, time
from trak_core.system import job
job._THREADS_SECONDS = 0.5
atexit.register(print, "the end")
def work():
    threading.Thread(target=time.sleep, args=({seconds},), name="mine").start()
    {end}
job.run_to_the_end(work)
"""


@pytest.mark.parametrize("seconds", [0.1, 600])
@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("pass", 0, ""), ("exit(3)", 3, ""), ("exit('no')", 1, "no\n"), ("1 / 0", 1, "Traceback")],
)
def test_a_process_ends_though_a_thread_does_not(seconds, end, status, said):
    code = ENDS.format(seconds=seconds, end=end)
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (status, "the end\n")
    assert found.stderr.startswith(said)
    left = "Threads were left running, and are not waited for after 0 s: mine."
    assert (left in found.stderr) == (seconds == 600)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (10, 3), (9, 3), (5, 100)])
def test_blocks_cover_all_rows_in_order(n, size, capsys):
    found = list(blocks_with_progress(n, size, "samples"))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(n))
    assert max(stop - start for start, stop in found) <= size
    assert capsys.readouterr().out.endswith(f"{n}/{n} samples, 0 s, 0 s left\n")


def test_progress_is_a_line_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(blocks.time, "monotonic", lambda: next(clock))
    list(blocks_with_progress(10, 1, "samples"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[######..............] 3/10 samples, 12 s, 28 s left"
    assert len(lines) == 4


@pytest.mark.parametrize("key", ["training", "evaluation"])
def test_what_an_optimizer_imports_is_there_when_a_training_is_forked(key):
    code = (
        "import pkgutil, sys; import torch\n"
        "from trak_core.command.run import preloaded\n"
        f"for name in preloaded({{{key!r}: {{}}}})[1:]:\n    pkgutil.resolve_name(name)\n"
        "before = set(sys.modules)\n"
        "torch.optim.AdamW([torch.ones(2, requires_grad=True)]).step()\n"
        "print(*(name for name in set(sys.modules) - before if name.startswith('torch._d')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
