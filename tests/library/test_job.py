import os
import platform
import re
from pathlib import Path

import pytest
from patience import run_python

from trak_core.runtime import progress as blocks
from trak_core.runtime.progress import blocks_with_progress


def run(body, log):
    code = (
        f"from trak_core.runtime.job import logged_to\nwith logged_to({str(log)!r}):\n    {body}\n"
    )
    return run_python(code, check=False)


def test_everything_goes_to_the_log(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("of an earlier run")
    result = run("import os; print('python'); os.system('echo child; echo error >&2')", log)
    assert result.returncode == 0
    assert result.stdout == result.stderr == ""
    assert sorted(log.read_text().splitlines()) == ["child", "error", "python"]


def test_an_input_error_is_one_message_and_a_defect_keeps_its_traceback(tmp_path):
    log = tmp_path / "a.log"
    body = "from trak_core.errors import InputError; raise InputError('what to do')"
    assert run(body, log).returncode == 1
    assert log.read_text() == "Error: what to do\n"
    assert run("raise KeyError('x')", log).returncode == 1
    assert "Traceback" in log.read_text()


STOPPED = """
import ctypes, os, signal, time
from pathlib import Path
from trak_core.runtime.files import atomic_write
from trak_core.runtime.job import logged_to

def stop():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)

class Deleted:
    __del__ = lambda self: stop()

def callback():
    ctypes.CFUNCTYPE(None)(stop)()

with logged_to("a.log"), atomic_write(Path("half.h5")) as partial:
    partial.touch()
    try:
        WHERE()
        time.sleep(30)
    except Exception:
        print("went on")
"""


@pytest.mark.parametrize("where", ["stop", "Deleted", "callback"])
def test_a_job_that_is_told_to_stop_says_so_and_leaves_nothing_half_written(where, tmp_path):
    """Python ignores what ``__del__`` and callbacks raise, so that the signal is sent again."""
    code = STOPPED.replace("WHERE", where)
    run_python(code, cwd=tmp_path, timeout=20, check=False)
    (line,) = (tmp_path / "a.log").read_text().splitlines()
    assert line.startswith("Error: the job was stopped by SIGTERM, which")
    assert {path.name for path in tmp_path.iterdir()} == {"a.log"}


INTERRUPTED = """
import os, signal, threading, time
from concurrent.futures import ThreadPoolExecutor
from trak_core.runtime.job import explain_interrupts

signal.signal(signal.SIGINT, signal.default_int_handler)
explain_interrupts("results", is_main=True)
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
jobs = ThreadPoolExecutor()
for _ in range(2):
    jobs.submit(time.sleep, 60)
try:
    interrupt()
    time.sleep(60)
except SystemExit:
    threading.Timer(0.5, interrupt).start()
    WAIT
"""


@pytest.mark.parametrize("wait", ["jobs.shutdown()", "pass  # Python waits when it exits."])
def test_another_ctrl_c_does_not_wait_for_jobs(wait):
    """Snakemake waits for two threads, as it does for two jobs."""
    code = INTERRUPTED.replace("WAIT", wait)
    ended = run_python(code, timeout=40, check=False)
    assert ended.returncode == 130
    stopping, kept = ended.stderr.split("\n", 1)[1].splitlines()
    assert stopping.startswith("Stopping after Ctrl-C")
    assert kept.startswith("Stopped by Ctrl-C. Finished files are kept in results")


@pytest.mark.parametrize(("n", "size"), [(1, 1), (10, 3), (9, 3), (5, 100)])
def test_blocks_cover_all_rows_in_order(n, size, capsys):
    found = list(blocks_with_progress(n, size, "samples"))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(n))
    assert max(stop - start for start, stop in found) <= size
    assert capsys.readouterr().out.endswith(f"{n}/{n} samples, 0 s, 0 s left\n")


def test_code_that_runs_beside_a_progress_bar_prints_by_its_module():
    folders = ("attribution", "gradients", "gramian", "model_outputs", "projection", "study")
    root = Path(blocks.__file__).parents[1]
    files = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"^ *print\(", path.read_text(), re.M)] == []


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="runs on Linux with glibc")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    code = """
import os
import numpy as np
from trak_core.runtime.job import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

keep_freed_memory()
before = resident()
arrays = [np.full(2**21, 1.0) for _ in range(8)]  # 16 MiB each
del arrays
print(resident() - before)
"""
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC", "GLIBC", "LD_"))}
    kept, given_back = (
        float(run_python(code, env=plain | own).stdout)
        for own in ({}, {"MALLOC_TRIM_THRESHOLD_": "131072"})
    )
    assert 100 < kept < 256
    assert given_back < 30
