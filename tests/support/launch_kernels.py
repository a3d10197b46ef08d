"""Project as on a GPU of compute capability 9.0, with a driver that notes what it is given.

A program, because a process has either numba's compiler or its simulator. It prints JSON: what each
launch was given, the modules that were imported, and numba's own arguments and types of parameters,
which it looks up if called with `numba`.
"""

import contextlib
import ctypes
import json
import re
import sys
from types import SimpleNamespace

import torch

from trak_core.projection.cuda import compiled, project, project_slices
from trak_core.settings import ProjectionSpec

# Kind, rows and dtype: every kernel, and every dtype that one reads.
CASES = [
    ("rademacher", 8, torch.float32),
    ("rademacher", 9, torch.float16),
    ("normal", 8, torch.float32),
    ("normal", 8, torch.float16),
    ("hadamard", 4, torch.bfloat16),
]
PROJ_DIM, CAPABILITY = 64, (9, 0)
launches: list = []
functions: list = []


class Driver:
    """CUDA's driver: success, and what a kernel would read."""

    def cuModuleLoadData(self, code):
        return 0, code

    def cuModuleGetFunction(self, code, name):
        functions.append(code)
        return 0, name

    def cuLaunchKernel(self, name, x, y, z, *threads_and_more):
        *threads, shared, stream, addresses, extra = threads_and_more
        pointers = ctypes.cast(addresses, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)))
        n = 7 + 4 + 7 + 2 if b"add_partials" in name else 7 + 8 + 7 + 20 + 1
        words = [pointers[i].contents.value for i in range(n)]
        launches.append({
            "name": name.decode(),
            "grid": [x, y, z, *threads, shared, stream, extra],
            "words": words,
        })
        return (0,)


def of_numba(types, arguments):
    """What numba would hand to the driver for these arguments."""
    from numba.cuda import dispatcher

    class Array(SimpleNamespace):
        def to_device(self, *_):
            return self

    def numbered(argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        layout = SimpleNamespace(strides_in_bytes=(argument.element_size(),))
        dtype = SimpleNamespace(itemsize=argument.element_size())
        n = argument.numel()
        return Array(size=n, dtype=dtype, ptr=argument.data_ptr(), shape=(n,), _layout=layout)

    dispatcher.wrap_arg = lambda value: value
    kernel = SimpleNamespace(extensions=[])
    prepare = dispatcher._Kernel._prepare_args
    kernel._prepare_args = lambda *given: prepare(kernel, *given)
    words: list = []
    for name, argument in zip(types, arguments, strict=True):
        kernel._prepare_args(compiled._numba_type(name), numbered(argument), None, [], words)
    return [getattr(word, "value", word) for word in words]


def parameters_of(kernel, types):
    """The bits of each parameter of a kernel, in PTX."""
    from numba import cuda

    definition = compiled.definition(kernel).py_func
    signature = tuple(map(compiled._numba_type, types))
    code, _ = cuda.compile(definition, signature, device=False, abi="numba", cc=CAPABILITY)
    entry = code[code.index(".entry") : code.index("{", code.index(".entry"))]
    return [int(bits) for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]


def main():
    expected: list = []
    compiled._driver = Driver
    project.capability_of = lambda _: CAPABILITY
    project.require_right_matrix = lambda *_: None
    project._on = lambda _: contextlib.nullcontext()
    torch.cuda.get_device_capability = lambda _: CAPABILITY
    torch.cuda.current_stream = lambda: SimpleNamespace(device_index=0, cuda_stream=7)
    asks_numba = sys.argv[1:] == ["numba"]
    if asks_numba:
        from numba.cuda import dispatcher

        # Functions of kernels are compiled for the GPU at hand; there is none.
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)
        launch = project_slices.launch

        def launch_and_ask(kernel, types, grid, n_threads, *arguments):
            expected.append([of_numba(types, arguments), parameters_of(kernel, types)])
            launch(kernel, types, grid, n_threads, *arguments)

        project_slices.launch = launch_and_ask
    for kind, rows, dtype in CASES:
        spec = ProjectionSpec(
            kind=kind, n_params=2**34, proj_dim=PROJ_DIM, seed=2**63 + 5, stream=2**31 + 3
        )
        out = torch.zeros(rows, PROJ_DIM)
        project.project_cuda([torch.zeros(rows, 256, dtype=dtype)], spec, 2**33, out)
    print(
        json.dumps({
            "launches": launches,
            "expected": expected,
            "are_elf": all(code.startswith(b"\x7fELF") for code in functions),
            "modules": [name for name in sys.modules if re.match(r"numba\.cuda|cuda\.", name)],
        })
    )


if __name__ == "__main__":
    main()
