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


_GNU = """
import ctypes
import torch
program = ctypes.CDLL(None)
gnu = hasattr(program, "omp_pause_resource_all") and not hasattr(program, "__kmpc_fork_call")
print("GNU" if gnu else "other")
"""


def _run(code: str, **environ: str) -> str:
    ours = ("MALLOC", "GLIBC", "LD_PRELOAD", "OMP_", "GOMP_")
    environ = {n: value for n, value in os.environ.items() if not n.startswith(ours)} | environ
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, check=True, timeout=100, stdout=subprocess.PIPE, text=True, env=environ
    ).stdout


@pytest.fixture(scope="module")
def _gnu() -> None:
    if sys.platform != "linux" or _run(_GNU).strip() != "GNU":
        pytest.skip("runs where torch computes on the threads of GNU's OpenMP, on Linux")


@pytest.mark.usefixtures("_gnu")
def test_threads_of_openmp_end_and_come_back():
    code = """
from trak_core.projection.cpu.slices import pause_openmp
pause_openmp()
until = time.monotonic() + 10
while running() > spun - 2 and time.monotonic() < until:
    time.sleep(0.001)
assert running() <= spun - 2, running()
assert torch.equal(numbers.cos(), expected)
assert running() == spun and torch.get_num_threads() == 3
"""
    _run(_THREADS + code)


@pytest.mark.usefixtures("_gnu")
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


@pytest.mark.usefixtures("_gnu")
def test_nor_does_a_process_of_multiprocessing_that_imports_this_first():
    code = """
import multiprocessing, sys
import torch
torch.set_num_threads(3)
numbers = torch.arange(3_000_000.0).cos()

def work():
    assert "trak_core" not in sys.modules
    import numpy as np
    from trak_core.projection import project
    from trak_core.spec import ProjectionSpec
    spec = ProjectionSpec(kind="rademacher", n_params=100_000, proj_dim=8, seed=0, stream=0)
    rows = np.ones((2, 100_000), np.float32)
    assert (project(rows, spec, threads=2) == project(rows, spec)).all()

worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
raise SystemExit(worker.exitcode)
"""
    _run(code)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is asked")
def test_freed_memory_is_kept_unless_the_user_says_otherwise():
    code = """
import os
import numpy as np
from trak_core.system.job import keep_freed

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

keep_freed()
before = resident()
arrays = [np.full(2**21, 1.0) for _ in range(8)]  # 16 MiB each
del arrays
print(resident() - before)
"""
    kept, given_back = float(_run(code)), float(_run(code, MALLOC_TRIM_THRESHOLD_="131072"))
    assert 100 < kept < 256
    assert given_back < 30
