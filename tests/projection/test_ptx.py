"""What the GPU's compiler makes of the kernels, looked at without a GPU.

The simulator runs the kernels' Python; here NVIDIA's own compiler and assembler work on them, for
an A100 (8.0) and an H100 (9.0). Speed hangs on what is looked for: the products in a loop with
nothing but registers and shared memory around them.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from workspace import REPOSITORY

CAPABILITIES = ["8.0", "9.0"]
PTXAS = ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/bin/ptxas")
DISASSEMBLER = ("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm")


PACKAGES = ("numba-cuda", "nvidia-cuda-nvrtc-cu12", PTXAS[0], DISASSEMBLER[0])


def missing():
    for package in PACKAGES:
        try:
            distribution(package)
        except PackageNotFoundError:
            yield package


pytestmark = pytest.mark.skipif(
    any(missing()),
    reason=f"runs on Linux with the extra `test` installed; not here: {', '.join(missing())}",
)


def run(*command, **options):
    """Return what a program of the toolkit prints."""
    if isinstance(command[0], tuple):
        package, path = command[0]
        command = (distribution(package).locate_file(path), *command[1:])
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=True, **options
    )
    return result.stdout + result.stderr


class Kernel:
    """One compiled kernel: its PTX, the assembler's report, and the machine's instructions."""

    def __init__(self, path):
        self.name, self.code, binary = path.stem, path.read_text(), path.with_suffix(".cubin")
        self.architecture = "sm_" + "".join(path.stem.split(".")[-2:])
        self.report = run(PTXAS, "-v", f"-arch={self.architecture}", path, "-o", binary)
        self.listing = run(DISASSEMBLER, "-c", binary)

    def loops(self):
        """Return the instructions of every loop, from a label to the jump back to it."""
        labels, instructions, found = {}, [], []
        for line in self.listing.splitlines():
            if label := re.match(r"(\.L_\w+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
                instructions.append(instruction[1])
                jump = re.search(r"\bBRA.*`\((\.L_\w+)\)", instruction[1])
                if jump and jump[1] in labels:
                    found.append(instructions[labels[jump[1]] :])
        return found


def count(instructions, pattern):
    return sum(bool(re.match(rf"(@!?U?P\w+ )?({pattern})\b", i)) for i in instructions)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Return all kernels by name and capability."""
    folder = tmp_path_factory.mktemp("ptx")
    program = REPOSITORY / "tests/support/compile_kernels.py"
    n_parts = 2
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder, str(part), str(n_parts), *CAPABILITIES],
            env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(n_parts)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)
    return {path.stem: Kernel(path) for path in folder.glob("*.ptx")}


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_lives_in_registers_and_shared_memory(kernels, capability):
    found = [kernel for name, kernel in kernels.items() if name.endswith(capability)]
    # Those of the list in compile_kernels.py, and what adds up the slices.
    for kernel, n in (("tensor_core", 6), ("portable", 4), ("hadamard", 4), ("sjlt", 2)):
        assert sum(k.name.startswith(f"{kernel}_kernel") for k in found) == n
    assert any(kernel.name.startswith("add_partials_kernel") for kernel in found)
    for kernel in found:
        assert f".target {kernel.architecture}" in kernel.code
        message = f"{kernel.name}:\n{kernel.report}"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.report, (
            message
        )
        assert not re.search(r"\b(LDL|STL)\b", kernel.listing), message


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("case", "dtype", "column_tiles", "sample_tiles"),
    [
        ("8-float16", "f16", 8, 1),
        ("16-float16", "f16", 4, 2),
        ("40-float16", "f16", 4, 4),
        ("8-bfloat16", "bf16", 8, 1),
        ("16-bfloat16", "bf16", 4, 2),
        ("16-float32", "bf16", 4, 4),
    ],
)
def test_main_loop_is_products(kernels, capability, case, dtype, column_tiles, sample_tiles):
    """Of one block of 128 coordinates: 8 steps of 16, by tiles of 16 columns and of 8 rows."""
    kernel = kernels[f"tensor_core_kernel-rademacher-8-{case}.{capability}"]
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32" in kernel.code
    assert "LDGSTS" in kernel.listing  # gradients are copied while others are multiplied
    product = r"HMMA\.16816\.F32(\.BF16)?"
    main = min((loop for loop in kernel.loops() if count(loop, product)), key=len)
    assert count(main, product) == 8 * column_tiles * sample_tiles
    assert count(main, r"LDSM\.\S+") == 4 * sample_tiles
    assert not count(main, r"(LDG|LDGSTS|STG|STS|LDS|BAR)(\.\S+)?")
    # 16 x 16 entries of the matrix take 4 registers, with a shift and an operation each, and their
    # share of Philox, besides one product for 8 rows.
    assert len(main) / (8 * column_tiles) <= 13 + sample_tiles, f"{len(main)} instructions"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("case", ["8-8-float16", "8-16-float32"])
def test_normal_entries_are_rounded_at_every_step(kernels, capability, case):
    """Contracted to one rounding, they would be other numbers than the CPU's."""
    code = kernels[f"portable_kernel-normal-{case}.{capability}"].code
    entries = code.count("mul.rn.f32") / 5
    assert entries >= 4
    assert entries % 4 == 0
    assert code.count("add.rn.f32") == 2 * entries
