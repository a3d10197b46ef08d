"""Compile variants of the CUDA kernels to PTX, on any machine.

Run as a program with a folder, the number of a part of the work and of how many, and compute
capabilities: a process has either numba's compiler or its simulator, and several share the work.
Every call is made as on a GPU up to the launch; there the kernel is compiled for the types that it
would be given.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.cudadrv import nvvm
from numba.cuda.typing.typeof import Purpose, typeof

from trak_core.projection.cuda import choose, hadamard, portable, reduce, sjlt, slices, tensor_core
from trak_core.spec import ProjectionSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Each kernel in all its tiles, and with each dtype: kernel, kind, proj_dim, rows, dtype. Float32 on
# tensor cores comes as twice as many rows of bfloat16.
CASES = [
    ("tensor_core", "rademacher", 8, 8, F16),
    ("tensor_core", "rademacher", 8, 16, F16),
    ("tensor_core", "rademacher", 8, 40, F16),
    ("tensor_core", "rademacher", 8, 8, BF16),
    ("tensor_core", "rademacher", 8, 16, BF16),
    ("tensor_core", "rademacher", 8, 16, F32),
    ("portable", "rademacher", 8, 8, F32),
    ("portable", "rademacher", 8, 16, BF16),
    ("portable", "normal", 8, 8, F16),
    ("portable", "normal", 8, 16, F32),
    ("hadamard", "hadamard", 1, 1, BF16),
    ("hadamard", "hadamard", 512, 1, F16),
    ("hadamard", "hadamard", 4096, 1, F32),
    ("hadamard", "hadamard", 65536, 1, F16),
    ("sjlt", "sjlt", 4, 1, BF16),
    ("sjlt", "sjlt", 4096, 1, F32),
]


def compile_all(folder: Path, cases: list, capabilities: list[tuple[int, int]]) -> None:
    label = ""
    done = set()

    def compile_instead(kernel, grid, n_threads, *arguments):
        name, bounds = kernel.py_func.__name__.strip("_"), kernel.targetoptions["launch_bounds"]
        if n_threads > bounds[0]:
            raise ValueError(
                f"{name} is started with {n_threads} threads and compiled for {bounds}"
            )
        values = (a.numpy() if isinstance(a, torch.Tensor) else a for a in arguments)
        types = tuple(typeof(value, Purpose.argument) for value in values)
        if (kernel, types) in done:
            return
        done.add((kernel, types))

        # Most of the time goes into what comes before the capability counts.
        def compile_all_capabilities(modules, **options):
            for capability in capabilities:
                major, minor = capability
                code = compile_ir(modules, **options | {"arch": f"compute_{major}{minor}"})
                text = code.decode().strip("\0")
                (folder / f"{name}-{label}.{major}.{minor}.ptx").write_text(text)
            return code

        compile_ir, nvvm.compile_ir = nvvm.compile_ir, compile_all_capabilities
        try:
            cuda.compile(
                kernel.py_func,
                types,
                device=False,
                abi="numba",
                cc=capabilities[0],
                output="ptx",
                launch_bounds=bounds,
            )
        finally:
            nvvm.compile_ir = compile_ir

    # Functions of kernels are compiled for the GPU at hand; there is none.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capabilities[0])
    for module in (hadamard, portable, reduce, sjlt, tensor_core):
        module.launch = compile_instead
    for kernel_name, kind, proj_dim, rows, dtype in cases:
        # The portable kernel is for GPUs whose tensor cores don't know m16n8k16.
        assumed = (7, 5) if kernel_name == "portable" else (8, 0)
        choose.capability_of = lambda _, assumed=assumed: assumed
        label = f"{kind}-{proj_dim}-{rows}-{str(dtype).removeprefix('torch.')}"
        spec = ProjectionSpec(kind=kind, n_params=300, proj_dim=proj_dim, seed=0, stream=0)
        gradients, out = torch.zeros((rows, 300), dtype=dtype), torch.zeros((rows, proj_dim))
        method = choose.choose(spec, dtype, out.device)
        if method.name != kernel_name:
            raise ValueError(f"{label} is projected by {method.name}")
        slices.project_slices([gradients], spec, 0, out, method)


if __name__ == "__main__":
    folder, part, n_parts, *names = sys.argv[1:]
    capabilities = [(int(name.split(".")[0]), int(name.split(".")[1])) for name in names]
    compile_all(Path(folder), CASES[int(part) :: int(n_parts)], capabilities)
