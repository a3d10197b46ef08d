"""Numba's CUDA simulator with one thread of a block running at a time.

As it comes, the simulator starts a thread of the system for each of the GPU's and keeps asking all
of them whether they have reached a barrier; two that come to a shared array together may even get
two arrays. Here each thread is a greenlet and runs until its next barrier. That is many times
faster, the same every time, and in an order that a test picks: a kernel that lacks a barrier gives
other results in another order. Memory that nobody wrote holds NaN, or indices out of any range.
"""

from collections import deque
from functools import lru_cache
from types import SimpleNamespace

import inline_ptx_simulated
import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel as simulator_kernel
from numba.cuda.simulator import kernelapi

from trak_core.projection.cuda import dense, device_functions

# Functions of their arguments alone, which most time goes into; many threads make the same calls.
_philox = lru_cache(2**16)(device_functions.philox)
_normal_of = lru_cache(2**16)(device_functions.normal_of)
_sign_of = lru_cache(2**16)(device_functions.sign_of)


class _Thread(greenlet):
    """One thread of the GPU, with what the simulator's code asks a thread for."""

    def __init__(self, block, place, manager, grid_point):
        super().__init__(block.body)
        self.block = block
        self.threadIdx, self.blockIdx = kernelapi.Dim3(*place), kernelapi.Dim3(*grid_point)
        self._manager, self.copies = manager, []

    def syncthreads(self):
        self.block.wait("all", len(self.block.alive))


class _Block:
    """The threads of one block: which are ready to run, and which wait at what barrier."""

    def __init__(self, body, manager, grid_point, backwards):
        self.body = body
        places = np.ndindex(*manager._block_dim)
        self.alive = {_Thread(self, place, manager, grid_point) for place in places}
        self._sign = -1 if backwards else 1
        self._waiting, self._values, self._results = {}, {}, {}
        self._ready = deque(self._in_order(self.alive))

    def _in_order(self, threads):
        return sorted(threads, key=lambda thread: self._sign * thread.threadIdx.x)

    def _release(self, barrier):
        self._ready.extend(self._in_order(self._waiting.pop(barrier)))

    def run(self):
        hub = getcurrent()
        while self._ready:
            thread = self._ready.popleft()
            thread.parent = hub
            thread.switch()
            if thread.dead:
                self.alive.remove(thread)
                if self.alive and len(self._waiting.get("all", ())) == len(self.alive):
                    self._release("all")
        if self.alive:
            raise RuntimeError("Threads wait at a barrier to which the others don't come.")

    def wait(self, barrier, parties):
        """Let the current thread wait until ``parties`` have come."""
        waiting = self._waiting.setdefault(barrier, [])
        waiting.append(getcurrent())
        if len(waiting) == parties:
            self._release(barrier)
        getcurrent().parent.switch()

    def together(self, warp, lane, n_lanes, function, value):
        """Return a lane's part of ``function`` of the values of all lanes of its warp."""
        values = self._values.setdefault(warp, {})
        values[lane] = value
        if len(values) == n_lanes:
            self._results[warp] = function([values.pop(i) for i in range(n_lanes)])
        self.wait(warp, n_lanes)
        return self._results[warp][lane]


def _caller_of(frame):
    """The last entries of ``traceback.extract_stack``, which reads the source of all the stack."""
    caller = frame.f_back
    return [(caller.f_code.co_filename, caller.f_lineno), (frame.f_code.co_filename, 0)]


class _PoisonedNumpy:
    """NumPy, but that the bits of new memory are all set."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def empty(shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(255)
        return array


def run_one_thread_at_a_time(monkeypatch, *, backwards=False):
    """Patch the simulator for one test.

    Args:
        monkeypatch: The fixture.
        backwards: Whether threads run in the order of falling instead of rising numbers.
    """

    def run_block(manager, grid_point, *arguments):
        _Block(lambda: manager._f(*arguments), manager, grid_point, backwards).run()

    monkeypatch.setattr(simulator_kernel.BlockManager, "run", run_block)
    monkeypatch.setattr(kernelapi, "threading", SimpleNamespace(current_thread=getcurrent))
    monkeypatch.setattr(kernelapi, "np", _PoisonedNumpy())
    monkeypatch.setattr(kernelapi, "traceback", SimpleNamespace(extract_stack=_caller_of))
    monkeypatch.setattr(dense, "ptx", inline_ptx_simulated)
    monkeypatch.setattr(dense, "normal_of", _normal_of)
    monkeypatch.setattr(dense, "sign_of", _sign_of)
    for module in (device_functions, dense):
        monkeypatch.setattr(module, "philox", _philox)
