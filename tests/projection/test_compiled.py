"""Kernels are compiled once a machine, and started with the arguments that numba would give."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions

import pytest
from patience import waited
from workspace import REPOSITORY

from trak_core.projection.cuda import compiled
from trak_core.projection.cuda.variants import TILES, Kernel

PACKAGES = ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvrtc")
MISSING = [package for package in PACKAGES if not list(distributions(name=package))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the program, with one cache for all processes."""
    if MISSING:
        pytest.skip(f"runs with the extra `test` installed; not here: {', '.join(MISSING)}")
    cache = tmp_path_factory.mktemp("cache")
    paths = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(REPOSITORY)}

    def once(*arguments):
        command = [sys.executable, REPOSITORY / "tests/support/launch_kernels.py", *arguments]
        process = subprocess.Popen(
            command,
            env=os.environ | paths | {"NUMBA_ENABLE_CUDASIM": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        output, _ = waited(partial(process.communicate, None), 200)
        assert not process.returncode
        return json.loads(output), sorted(cache.rglob("*.*"))

    return once


@pytest.fixture(scope="module")
def first(run):
    return run("numba")


@pytest.mark.gate  # compiles
def test_a_launch_gives_what_numba_would(first):
    """Each word that the driver reads, and the width of each of the kernel's parameters in PTX."""
    result, _ = first
    assert len(result["launches"]) == len(result["expected"]) == 10
    for launched, (words, bits) in zip(result["launches"], result["expected"], strict=True):
        assert launched["words"] == words
        assert len(bits) == len(words)
        assert all(0 <= word < 2**width for word, width in zip(words, bits, strict=True))
        *_, shared, stream, extra = launched["grid"]
        assert (shared, stream, extra) == (0, 7, 0)


@pytest.mark.gate
def test_a_later_process_needs_no_compiler(first, run):
    (before, kept), (after, kept_later) = first, run()
    assert before["are_elf"]
    assert after["are_elf"]
    assert kept == kept_later
    names = [[launch["name"] for launch in result["launches"]] for result in (before, after)]
    assert names[0] == names[1]
    assert len(kept) == len(set(names[0]))
    assert any(name.startswith("numba.cuda") for name in before["modules"])
    compilers = ("numba.cuda", "cuda.bindings.nvjitlink", "cuda.bindings.nvvm")
    assert not [name for name in after["modules"] if name.startswith(compilers)]


def test_what_decides_the_code_decides_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels = [
        Kernel("dense.tensor_core_kernel", (tile, bfloat16, 4096))
        for tile in TILES
        for bfloat16 in (False, True)
    ]
    paths = [
        compiled.cache_path(".cubin", kernel, types, capability)
        for kernel in kernels
        for types in (("float32[:]",), ("float16[:]",))
        for capability in ((8, 0), (8, 6))
    ]
    monkeypatch.setattr(compiled, "_source", lambda: b"another")
    paths.append(compiled.cache_path(".cubin", kernels[0], ("float32[:]",), (8, 0)))
    assert len(set(paths)) == len(paths) == 25


def test_code_is_kept_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    monkeypatch.setattr(compiled, "compile_kernel", lambda *_: calls.append(1) or b"code")
    given = Kernel("dense.portable_kernel"), ("float32[:]",), (8, 0)
    assert [compiled.machine_code(*given) for _ in range(2)] == [b"code"] * 2
    assert len(calls) == 1
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    for damage in (b"", file.read_bytes()[:-1], file.read_bytes()[:-1] + b"x"):
        file.write_bytes(damage)  # as a power cut leaves it
        assert compiled.machine_code(*given) == b"code"
    assert len(calls) == 4
    assert compiled.read_cached(file) == b"code"
