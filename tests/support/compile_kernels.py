"""Compile variants of the CUDA kernels as a GPU's machine does, on any machine.

Run as a program with a folder, the number of a part of the work and of how many, and targets such
as `13-10.0-lto`: which CUDA's compiler, a compute capability, and `lto` or `ptx`, numba's two ways
to the GPU's instructions: optimised when it is linked, as is the default, or before. A process has
either numba's compiler or its simulator, and several share the work. Every call is made as on a GPU
up to the launch; there the kernel is compiled for the types that it would be given.
"""

import ctypes
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import torch
from numba.cuda import dispatcher
from numba.cuda.cudadrv import nvrtc, nvvm

from trak_core.projection.cuda import compiled, project_slices
from trak_core.projection.cuda import project as project_cuda
from trak_core.settings import ProjectionSpec

# By CUDA's version: the compiler and what it takes mathematical functions from, and the linker.
LIBRARIES = {
    "12": (
        ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/nvvm/lib64/libnvvm.so"),
        ("nvidia-cuda-nvcc-cu12", "nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc"),
        ("nvidia-nvjitlink-cu12", "nvidia/nvjitlink/lib/libnvJitLink.so.12"),
    ),
    "13": (
        ("nvidia-nvvm", "nvidia/cu13/lib/libnvvm.so.4"),
        ("nvidia-nvvm", "nvidia/cu13/nvvm/libdevice/libdevice.10.bc"),
        ("nvidia-nvjitlink", "nvidia/cu13/lib/libnvJitLink.so.13"),
    ),
}
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
    ("hadamard", "hadamard", 128, 1, F16),
    ("hadamard", "hadamard", 512, 1, F16),
    ("hadamard", "hadamard", 4096, 1, F32),
    ("hadamard", "hadamard", 65536, 1, F16),
]


class Toolkit:
    """The compiler and the linker of one CUDA, by their C interfaces: numba loads one CUDA only."""

    def __init__(self, version: str):
        compiler, library, linker = (
            str(distribution(name).locate_file(path)) for name, path in LIBRARIES[version]
        )
        self.compiler, self.linker = ctypes.CDLL(compiler), ctypes.CDLL(linker)
        self.library = Path(library).read_bytes()

    def compile(self, modules: list[str], *options: str) -> bytes:
        """Return PTX, or with the option -gen-lto what only a linker reads."""
        program, calls = ctypes.c_void_p(), self.compiler
        check(calls.nvvmCreateProgram(ctypes.byref(program)))
        for module in modules:
            check(calls.nvvmAddModuleToProgram(program, *sized(module.encode()), None))
        check(calls.nvvmLazyAddModuleToProgram(program, *sized(self.library), None))
        check(calls.nvvmCompileProgram(program, *counted(options)))
        return content(calls, "nvvmGetCompiledResult", program)

    def link(self, code: bytes, *options: str) -> tuple[bytes, str]:
        """Return the GPU's instructions, and what the assembler says of them."""
        handle, calls = ctypes.c_void_p(), self.linker
        check(calls.nvJitLinkCreate(ctypes.byref(handle), *counted(options)))
        kind = 3 if "-lto" in options else 2
        check(calls.nvJitLinkAddData(handle, kind, *sized(code), b"kernel"))
        check(calls.nvJitLinkComplete(handle))
        report = content(calls, "nvJitLinkGetInfoLog", handle).decode()
        return content(calls, "nvJitLinkGetLinkedCubin", handle), report

    def build(self, modules: list[str], capability: str, way: str, path: Path) -> None:
        """Write a kernel's instructions, the report on them, and its PTX if there is one."""
        name = capability.replace(".", "") + ("a" if int(capability.split(".")[0]) >= 9 else "")
        lto = [["-gen-lto"], ["-lto"]] if way == "lto" else [[], []]
        code = self.compile(modules, "-opt=3", f"-arch=compute_{name}", *lto[0])
        binary, report = self.link(code, f"-arch=sm_{name}", "-verbose", "-Xptxas=-v", *lto[1])
        Path(f"{path}.cubin").write_bytes(binary)
        Path(f"{path}.txt").write_text(report)
        if way == "ptx":
            Path(f"{path}.ptx").write_bytes(code.strip(b"\0"))


def check(result: int) -> None:
    if result:
        raise RuntimeError(f"a call of the compiler or the linker returned {result}")


def sized(data: bytes) -> tuple[bytes, ctypes.c_size_t]:
    return data, ctypes.c_size_t(len(data))


def counted(options: tuple[str, ...]) -> tuple[int, ctypes.Array]:
    return len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))


def content(calls: ctypes.CDLL, name: str, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    check(getattr(calls, f"{name}Size")(handle, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(getattr(calls, name)(handle, buffer))
    return buffer.raw


def compile_all(folder: Path, cases: list, targets: list[str]) -> None:
    label = ""
    done = set()
    split = [target.split("-") for target in targets]
    toolkits = {version: Toolkit(version) for version, _, _ in split}

    # What comes before the capability counts takes most of the time, and is done once.
    def build(modules, **options):
        del options
        modules = [nvvm.llvm_replace(module) for module in modules]
        for target, (version, capability, way) in zip(targets, split, strict=True):
            path = folder / f"{name}-{label}.{target}"
            toolkits[version].build(modules, capability, way, path)
        return b""

    def compile_instead(named, types, grid, n_threads, *arguments):
        nonlocal name
        kernel = compiled.definition(named)
        name, bounds = kernel.py_func.__name__.strip("_"), kernel.targetoptions["launch_bounds"]
        if n_threads > bounds[0]:
            raise ValueError(
                f"{name} is started with {n_threads} threads and compiled for {bounds}"
            )
        if (named, types) not in done:
            done.add((named, types))
            compiled.compile_kernel(named, types, (8, 0))

    name = ""
    nvvm.compile_ir = build
    nvrtc.get_arch_option = lambda *_: ""
    compiled._linked = lambda code, _: code
    # Functions of kernels are compiled for the GPU at hand; there is none.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(8, 0))
    project_slices.launch = compile_instead
    for kernel_name, kind, proj_dim, rows, dtype in cases:
        # The portable kernel is for GPUs whose tensor cores don't know m16n8k16.
        assumed = (7, 5) if kernel_name == "portable" else (8, 0)
        project_cuda.capability_of = lambda _, assumed=assumed: assumed
        label = f"{kind}-{proj_dim}-{rows}-{str(dtype).removeprefix('torch.')}"
        spec = ProjectionSpec(kind=kind, n_params=300, proj_dim=proj_dim, seed=0, stream=0)
        gradients, out = torch.zeros((rows, 300), dtype=dtype), torch.zeros((rows, proj_dim))
        method = project_cuda.choose(spec, dtype, out.device)
        if method.name != kernel_name:
            raise ValueError(f"{label} is projected by {method.name}")
        project_slices.project_slices([gradients], spec, 0, out, method)


if __name__ == "__main__":
    folder, part, n_parts, *targets = sys.argv[1:]
    compile_all(Path(folder), CASES[int(part) :: int(n_parts)], targets)
