"""Project gradients on a GPU. Before a kernel is first used, check that its results are right."""

import importlib.util
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.projection.cuda import compiled, project_slices, variants
from trak_core.projection.cuda.compiled import is_simulated
from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionKind, ProjectionSpec

LEAST_CAPABILITY = (7, 0)
INSTEAD = "Alternatively, project on the CPU."


@cache
def require_numba_cuda() -> None:
    """Raise an error if the package numba-cuda is not installed.

    numba-cuda compiles kernels, and it depends on cuda.bindings, which launches them. Without
    numba-cuda, numba would use its own CUDA target, which is unmaintained and not tested here.
    """
    if not is_simulated() and importlib.util.find_spec("numba_cuda") is None:
        raise InputError(
            "To project on a GPU, the package numba-cuda must be installed. It was not found. "
            f"Run `pip install 'trak-core[cuda]'`. {INSTEAD}",
            code="projection.no_numba_cuda",
        )


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability, or the lowest supported one for numba's simulator."""
    if is_simulated():
        return LEAST_CAPABILITY
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, present = ("{}.{}".format(*c) for c in (LEAST_CAPABILITY, capability))
        raise InputError(
            f"To project on a GPU, the GPU must have compute capability {least} or later. Found "
            f"{name_of(device)}, which has capability {present}. {INSTEAD}",
            code="projection.capability",
        )
    return capability


def name_of(device: torch.device) -> str:
    return "numba's simulator" if is_simulated() else torch.cuda.get_device_name(device)


_TENSOR_CORES = (8, 0)  # the first capability with m16n8k16 products and asynchronous copies


def choose(spec: ProjectionSpec, dtype: torch.dtype, device: torch.device) -> project_slices.Method:
    """Return the method that projects gradients of the given dtype on a device.

    An ``InputError`` is raised if the GPU is too old, if the kind of projection has no kernel, or
    if ``spec.proj_dim`` is too large. No other device or method is used instead.
    """
    capability = capability_of(device)
    n_planes = alignment = 1
    match spec.kind:
        case ProjectionKind.RADEMACHER if capability >= _TENSOR_CORES:
            name, variant = "tensor_core", variants.tensor_core_variant
            n_planes, alignment = 2 if dtype is torch.float32 else 1, variants.ALIGNMENT
        case ProjectionKind.RADEMACHER | ProjectionKind.NORMAL:
            name, variant = "portable", variants.portable_variant
        case ProjectionKind.HADAMARD:
            if spec.proj_dim > project_slices.SLICE:
                raise InputError(
                    "On a GPU, proj_dim must be at most "
                    f"{project_slices.SLICE} for the projection kind hadamard. Found "
                    f"{spec.proj_dim}. {INSTEAD}",
                    code="projection.gpu_proj_dim",
                )
            name, variant = "hadamard", variants.hadamard_variant
        case kind:
            raise InputError(
                "To project on a GPU, the kind of projection must have a kernel for GPUs. Found "
                f"{kind}, which has none. {INSTEAD}",
                code="projection.gpu_kind",
            )
    if n_planes == 2:
        dtype = torch.bfloat16
    variant = partial(variant, spec, dtype is torch.bfloat16)
    return project_slices.Method(
        name=name, variant=variant, dtype=dtype, n_planes=n_planes, alignment=alignment
    )


# A kernel's test compares ROWS rows of the projection matrix, whose coordinates are STEP apart.
# Whole rows are compared or, if ``is_nested``, only the first COLUMNS entries of each row, which do
# not depend on the number of columns.
ROWS, STEP, COLUMNS = 32, 11, 515
_ENTRIES = 2**21  # the largest number of entries in a test

_passed: set[tuple[Any, ...]] = set()


def require_right_matrix(
    method: project_slices.Method,
    spec: ProjectionSpec,
    dtype: torch.dtype,
    device: torch.device,
    n_samples: int,
) -> None:
    """Before a kernel is first used on a device, check that it computes the right matrix R.

    The projections of unit vectors are rows of R, which are compared with ``reference.py``. The
    tested rows have coordinates beyond 2^32, on both sides of the boundary between two slices and
    at all positions in a block of 128. ``method`` is a result of ``choose``. ``n_samples``, the
    number of gradients, determines the variant of the kernel. An ``InputError`` is raised if the
    kernel does not compile or run, or if an entry is wrong.
    """
    kernel = method.variant(method.n_planes * n_samples).kernel
    if (device, kernel, dtype) in _passed:
        return
    marker = None  # the file that records a passed test of the kernel on this GPU model
    if not is_simulated():
        key = kernel, str(dtype), name_of(device), compiled.driver_version()
        marker = compiled.cache_path(".right", *key)
    if marker is not None and compiled.read_cached(marker) is not None:
        _passed.add((device, kernel, dtype))
        return
    proj_dim = min(spec.proj_dim, COLUMNS) if spec.is_nested else spec.proj_dim
    n_rows = min(n_samples, ROWS, max(1, _ENTRIES // proj_dim))
    offset = 2**33 + 5 * project_slices.SLICE - STEP * n_rows // 2
    stop = offset + STEP * n_rows
    small = replace(
        spec, proj_dim=proj_dim, n_params=stop, seed=0x243F6A8885A308D3, stream=0x13198A2E
    )
    picks = STEP * np.arange(n_rows) + STEP // 2
    gradients = torch.zeros((n_rows, STEP * n_rows), dtype=dtype)
    gradients[range(n_rows), picks] = 1
    out = torch.zeros((n_rows, proj_dim), dtype=torch.float32, device=device)
    try:
        small_method = choose(small, dtype, device)
        project_slices.project_slices([gradients.to(device)], small, offset, out, small_method)
        matrix = out.cpu().numpy()
    except Exception as error:
        remedy = (
            "Install numba-cuda[cu13], or numba-cuda[cu12] for a CUDA 12 driver, or set CUDA_HOME "
            "to a CUDA toolkit. Compare `python -m numba -s` with `nvidia-smi`."
        )
        if isinstance(error, AttributeError | ImportError):  # as with NumPy 2.5
            remedy = "`pip install 'trak-core[cuda]'` installs versions that work together."
        raise InputError(
            f"The kernel {method.name} must compile and run on {name_of(device)}. It failed with "
            f"{type(error).__name__}: {error}. {remedy} {INSTEAD}",
            code="projection.kernel_fails",
        ) from error
    expected = [projection_matrix(small, offset + int(g), 1)[0] for g in picks]
    wrong = matrix != np.array(expected, np.float32)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InputError(
            f"The kernel {method.name} must compute the same projection matrix as the CPU. On "
            f"{name_of(device)}, {wrong.sum()} of {wrong.size} entries of the {spec.kind} matrix "
            f"are wrong for {dtype} gradients. The first is at coordinate {offset + picks[row]}, "
            f"column {column}: {matrix[row, column]} instead of {expected[row][column]}. Project "
            "on the CPU, and report this error with the versions of numba-cuda and of the driver.",
            code="projection.kernel_differs",
        )
    _passed.add((device, kernel, dtype))
    if marker is not None:
        compiled.write_cached(marker, b"")


@contextmanager
def _on(device: torch.device) -> Generator[None]:
    """Make a GPU, and its CUDA context, current in this thread for a ``with`` block."""
    if is_simulated():
        yield
        return
    with torch.cuda.device(device):
        compiled.make_current(device)
        yield


def project_cuda(blocks: Sequence[Any], spec: ProjectionSpec, offset: int, out: Tensor) -> None:
    """Add the unscaled projection of the gradient blocks to ``out``.

    Compute out += X R[offset : offset + n], where X is the concatenation of the blocks, with n
    columns. R equals the matrix of ``reference.py`` bit for bit, which is tested before the first
    use of a kernel. Sums are float32. On tensor cores, a float32 gradient is replaced by the sum of
    two bfloat16 numbers, with a relative error of at most 2^-18. If a gradient has infinity or NaN,
    so does the result.

    On one device, results are bitwise equal for any split into blocks and batches. Calls for chunks
    that end at multiples of 65536 give the same bits as a single call. Work is queued on PyTorch's
    current stream. The function allocates less than 256 MiB in addition to its arguments.

    Args:
        blocks: Matrices (n_samples, n_i) with consecutive columns and one dtype, float32, float16
            or bfloat16. CUDA tensors, or CPU tensors for numba's simulator. Rows may be strided.
        spec: The projection, of any kind except ``identity`` and ``tensor_sketch``.
        offset: Coordinate of the first column.
        out: Shape (n_samples, spec.proj_dim), float32, on the same device. It may be strided.
    """
    require_numba_cuda()
    blocks = [block.detach() for block in blocks if block.shape[1]]
    if not blocks or not len(out):
        return
    with _on(out.device), torch.no_grad():
        dtype = blocks[0].dtype
        method = choose(spec, dtype, out.device)
        require_right_matrix(method, spec, dtype, out.device, len(out))
        project_slices.project_slices(blocks, spec, offset, out.detach(), method)
