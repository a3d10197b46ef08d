"""Threads of OpenMP, in a process of its own."""

import os
import sys

import pytest
from patience import run_python

# One process, because importing torch is most of the time.
_THREADS = """
import ctypes, multiprocessing, os, sys, threading, time
import torch

def project_rows(**options):
    import numpy as np
    from trak_core.projection import project
    from trak_core.settings import ProjectionSpec
    spec = ProjectionSpec(kind="rademacher", n_params=100_000, proj_dim=8, seed=0, stream=0)
    return project(np.ones((2, 100_000), np.float32), spec, **options)

def compare():
    assert (project_rows(threads=2) == project_rows()).all()

def compare_in_a_fork():
    projected = project_rows(threads=2)
    child = os.fork()
    if not child:
        is_same = (project_rows(threads=2) == projected).all()
        os._exit(not is_same or threading.active_count() not in {2, 3})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

program = ctypes.CDLL(None)
if not hasattr(program, "omp_pause_resource_all") or hasattr(program, "__kmpc_fork_call"):
    compare_in_a_fork()
    print("no GNU")
    raise SystemExit

def running():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = running()
numbers = torch.arange(3_000_000.0)
expected = numbers.cos()
spun = running()
assert spun >= before + 2, (before, spun)

# A process of multiprocessing that imports this first does not wait for threads.
assert "trak_core" not in sys.modules
worker = multiprocessing.get_context("fork").Process(target=compare)
worker.start()
worker.join()
assert worker.exitcode == 0, worker.exitcode

# Threads of OpenMP end and come back. A fork has ended those of other libraries.
from trak_core.projection.cpu.project import pause_openmp
spun = running()
pause_openmp()
until = time.monotonic() + 10
while running() > spun - 2 and time.monotonic() < until:
    time.sleep(0.001)
assert running() <= spun - 2, running()
assert torch.equal(numbers.cos(), expected)
assert running() == spun and torch.get_num_threads() == 3

# Nor does a fork wait for those that stayed behind, and it projects on threads of its own.
project_rows()
numbers.cos()
compare_in_a_fork()
"""


@pytest.mark.gate
@pytest.mark.skipif(sys.platform != "linux", reason="runs on Linux, where threads are counted")
def test_threads_of_openmp_end_and_come_back_and_no_fork_waits_for_them():
    plain = {n: v for n, v in os.environ.items() if "OMP_" not in n and n != "LD_PRELOAD"}
    done = run_python(_THREADS, env=plain | {"PYTHONWARNINGS": "ignore"}, timeout=100)
    if "no GNU" in done.stdout:
        pytest.skip("runs where torch computes on the threads of GNU's OpenMP")
