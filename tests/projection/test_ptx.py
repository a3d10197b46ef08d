"""What the GPU's compilers make of the kernels, looked at without a GPU.

The simulator runs the kernels' Python; here NVIDIA's own compilers and assemblers work on them, for
an A100 (8.0), an H100 (9.0), a B200 (10.0) and an RTX 5090 (12.0). Speed hangs on what is looked
for: nothing in memory that belongs in registers, and the products in a loop with nothing but
registers and shared memory around them.
"""

import os
import re
import subprocess
import sys
from functools import cached_property, partial
from importlib.metadata import distribution, distributions

import pytest
from filelock import FileLock
from patience import waited
from workspace import REPOSITORY

# CUDA's version, compute capability, and when the code is optimised: see compile_kernels.py. Both
# CUDAs compile in one way before capability 10.0; from there on each has a way of its own. Any two
# of the three come together.
TARGETS = ["12-8.0-ptx", "13-9.0-lto", "12-10.0-ptx", "13-10.0-lto", "12-12.0-lto", "13-12.0-ptx"]
DISASSEMBLER = ("nvidia-cuda-nvdisasm", "nvidia/cu13/bin/nvdisasm")
PACKAGES = (
    "numba-cuda",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    DISASSEMBLER[0],
)


MISSING = [package for package in PACKAGES if not list(distributions(name=package))]

pytestmark = [
    pytest.mark.gate,  # compiles every kernel for every GPU
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"runs on Linux with the extra `test` installed; not here: {', '.join(MISSING)}",
    ),
]


class Kernel:
    """One compiled kernel: the assembler's report, the machine's instructions, and any PTX."""

    def __init__(self, binary):
        self.name, self._binary = binary.stem, binary
        self.report = binary.with_name(f"{binary.stem}.txt").read_text()

    @property
    def code(self):
        return self._binary.with_name(f"{self.name}.ptx").read_text()

    @cached_property
    def listing(self):
        program = distribution(DISASSEMBLER[0]).locate_file(DISASSEMBLER[1])
        command = [str(program), "-c", str(self._binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def loops(self):
        """Return the instructions of every loop, from a label to the jump back to it."""
        labels, instructions, found = {}, [], []
        for line in self.listing.splitlines():
            if label := re.match(r"(\.L_\w+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?!NOP)(\S.*?);", line):
                instructions.append(instruction[1])
                jump = re.search(r"\bBRA.*`\((\.L_\w+)\)", instruction[1])
                if jump and jump[1] in labels:
                    found.append(instructions[labels[jump[1]] :])
        return found


def count(instructions, pattern):
    return sum(bool(re.match(rf"(@!?U?P\w+ )?({pattern})\b", i)) for i in instructions)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Return all kernels by name and target; compiled once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    with FileLock(folder.with_suffix(".lock")):
        if not (folder / "complete").exists():
            folder.mkdir(exist_ok=True)
            compile_all(folder)
            (folder / "complete").touch()
    return {path.stem: Kernel(path) for path in folder.glob("*.cubin")}


def compile_all(folder):
    program = REPOSITORY / "tests/support/compile_kernels.py"
    n_parts = 2
    processes = [
        subprocess.Popen(
            [sys.executable, program, folder, str(part), str(n_parts), *TARGETS],
            env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for part in range(n_parts)
    ]
    outputs = [waited(partial(process.communicate, None), 300)[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(outputs)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_lives_in_registers_and_shared_memory(kernels, target):
    found = [kernel for name, kernel in kernels.items() if name.endswith(f".{target}")]
    # Those of the list in compile_kernels.py, and what adds up the slices.
    for kernel, n in (("tensor_core", 6), ("portable", 4), ("hadamard", 5)):
        assert sum(k.name.startswith(f"{kernel}_kernel") for k in found) == n
    assert any(kernel.name.startswith("add_partials_kernel") for kernel in found)
    architecture = "sm_" + target.split("-")[1].replace(".", "")
    for kernel in found:
        message = f"{kernel.name}:\n{kernel.report}"
        assert re.search(rf"for '{architecture}a?'", kernel.report), message
        # Local memory is what the stack frame holds.
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.report, (
            message
        )


@pytest.mark.parametrize("target", [t for t in TARGETS if t == "12-8.0-ptx" or t.endswith("lto")])
@pytest.mark.parametrize(
    ("case", "dtype", "column_tiles", "sample_tiles"),
    [
        ("8-float16", "f16", 4, 1),
        ("16-float16", "f16", 4, 2),
        ("40-float16", "f16", 4, 4),
        ("8-bfloat16", "bf16", 4, 1),
        ("16-bfloat16", "bf16", 4, 2),
        ("16-float32", "bf16", 4, 4),
    ],
)
def test_main_loop_is_products(kernels, target, case, dtype, column_tiles, sample_tiles):
    """Of one block of 128 coordinates: 8 steps of 16, by tiles of 16 columns and of 8 rows."""
    kernel = kernels[f"tensor_core_kernel-rademacher-8-{case}.{target}"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.listing)
    assert "LDGSTS" in kernel.listing  # gradients are copied while others are multiplied
    product = r"HMMA\.16816\.F32" + {"f16": r"(?!\.)", "bf16": r"\.BF16"}[dtype]
    main = min((loop for loop in kernel.loops() if count(loop, product)), key=len)
    assert count(main, product) == 8 * column_tiles * sample_tiles
    assert count(main, r"LDSM\.\S+") == 4 * sample_tiles
    assert not count(main, r"(LDG|LDGSTS|STG|STS|LDS|BAR)(\.\S+)?")
    # 16 x 16 entries of the matrix take 4 registers, with a shift and an operation each, and their
    # share of Philox, besides one product for 8 rows.
    assert len(main) / (8 * column_tiles) <= 13 + sample_tiles, f"{len(main)} instructions"


@pytest.mark.parametrize("target", [t for t in TARGETS if t.endswith("ptx")])
@pytest.mark.parametrize("case", ["8-8-float16", "8-16-float32"])
def test_normal_entries_are_rounded_at_every_step(kernels, target, case):
    """Contracted to one rounding, they would be other numbers than the CPU's."""
    code = kernels[f"portable_kernel-normal-{case}.{target}"].code
    entries = code.count("mul.rn.f32") / 5
    assert entries >= 4
    assert entries % 4 == 0
    assert code.count("add.rn.f32") == 2 * entries
