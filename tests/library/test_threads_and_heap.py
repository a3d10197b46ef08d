"""What a process asks of OpenMP and of the C library, looked at in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

_THREADS = """
import os, time
import numpy as np
import torch
from trak_core.projection import project
from trak_core.spec import ProjectionSpec

def running():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = running()
numbers = torch.arange(3_000_000.0)
expected = numbers.cos()
spun = running()
assert spun >= before + 2, (before, spun)
"""


def _run(code: str, **environ: str) -> str:
    environ = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | environ
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, check=True, timeout=100, stdout=subprocess.PIPE, text=True, env=environ
    ).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
def test_threads_of_openmp_end_and_come_back():
    code = """
from trak_core.system import openmp
openmp.rest()
until = time.monotonic() + 10
while running() > spun - 2 and time.monotonic() < until:
    time.sleep(0.001)
assert running() <= spun - 2, running()
assert torch.equal(numbers.cos(), expected)
assert running() == spun and torch.get_num_threads() == 3
"""
    _run(_THREADS + code)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
def test_a_fork_does_not_wait_for_threads_of_openmp_that_stayed_behind():
    code = """
spec = ProjectionSpec(kind="rademacher", n_params=100_000, proj_dim=8, seed=0, stream=0)
rows = np.ones((2, 100_000), np.float32)
wanted = project(rows, spec)
numbers.cos()
child = os.fork()
if not child:
    os._exit(not (project(rows, spec, threads=2) == wanted).all())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    _run(_THREADS + code)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    code = """
import resource
import numpy as np
from trak_core.system.heap import keep_freed

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed()
for i in range(21):
    if i == 1:
        before = faults()
    arrays = [np.full(2**21, i, np.float64) for _ in range(8)]  # 16 MiB each
    del arrays
print((faults() - before) / 20)
"""
    pages = 8 * 2**24 / os.sysconf("SC_PAGE_SIZE")
    kept, asked = float(_run(code)), float(_run(code, MALLOC_TRIM_THRESHOLD_="131072"))
    assert kept < pages / 20, kept
    assert asked > pages / 20, asked
