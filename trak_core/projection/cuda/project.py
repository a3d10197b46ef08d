"""Project on a GPU, after a check that its kernels run there and make the right matrix."""

import importlib.util
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.projection.cuda import compiled, project_slices, variants
from trak_core.projection.cuda.compiled import is_simulated
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionKind, ProjectionSpec

LEAST_CAPABILITY = (7, 0)
INSTEAD = "Or project on the CPU."


@cache
def require_numba_cuda() -> None:
    """Raise an error that explains unless kernels can be compiled and started here."""
    if is_simulated():
        return
    # A numba without it has a CUDA target of its own, no longer maintained and never tried here.
    # It brings along what starts kernels, cuda.bindings.
    if importlib.util.find_spec("numba_cuda") is None:
        raise InputError(
            "Projecting on a GPU needs the package numba-cuda. Found it not installed. "
            f"Run `pip install 'trak-core[cuda]'`. {INSTEAD}",
            code="projection.no_numba_cuda",
        )


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, which must not be too old.

    The simulator stands for one without tensor cores.
    """
    if is_simulated():
        if device.type == "cuda":
            raise InputError(
                "Projecting on a GPU needs its compiled kernels. Found numba's CUDA simulator "
                "switched on: unset NUMBA_ENABLE_CUDASIM.",
                code="projection.simulated",
            )
        return LEAST_CAPABILITY
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, present = ("{}.{}".format(*c) for c in (LEAST_CAPABILITY, capability))
        raise InputError(
            f"Projecting on a GPU needs compute capability {least} or later. Found {present} "
            f"({name_of(device)}). {INSTEAD}",
            code="projection.capability",
        )
    return capability


def name_of(device: torch.device) -> str:
    """Return what to call a device in a message."""
    return "numba's simulator" if is_simulated() else torch.cuda.get_device_name(device)


_TENSOR_CORES = (8, 0)  # the first capability that multiplies m16n8k16, and copies on its own


def choose(spec: ProjectionSpec, dtype: torch.dtype, device: torch.device) -> project_slices.Method:
    """Return the one method that projects gradients of a dtype on a device; there is no other try.

    Refused are an old GPU, a kind without kernels, and a proj_dim that is too large.
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
                    "The projection kind hadamard needs proj_dim at most "
                    f"{project_slices.SLICE} on a GPU. Found {spec.proj_dim}. {INSTEAD}",
                    code="projection.gpu_proj_dim",
                )
            name, variant = "hadamard", variants.hadamard_variant
        case kind:
            raise InputError(
                "The projection's kind must be one that has a kernel for GPUs. Found "
                f"{kind}. {INSTEAD}",
                code="projection.gpu_kind",
            )
    bfloat16 = dtype is torch.bfloat16 or n_planes == 2
    return project_slices.Method(
        name=name,
        variant=partial(variant, spec, bfloat16),
        dtype=torch.bfloat16 if n_planes == 2 else dtype,
        n_planes=n_planes,
        alignment=alignment,
    )


# Rows, the coordinates from one to the next, and columns where the kind leaves a choice.
ROWS, STEP, COLUMNS = 32, 11, 515
_ENTRIES = 2**21  # at most

_passed: set[tuple[Any, ...]] = set()


def require_right_matrix(
    method: project_slices.Method,
    spec: ProjectionSpec,
    dtype: torch.dtype,
    device: torch.device,
    n_samples: int,
) -> None:
    """Compare the bits of R that a kernel makes with the definition, at its first use on a device.

    Rows of zeros with a single one pick out single rows of R, at coordinates beyond 2^32, across
    the edge of a slice and in all places of a block of 128. The method is what ``choose`` returned;
    ``n_samples``, the gradients' rows, decides which variant of a kernel runs. Refused is a kernel
    that cannot be compiled or started, or has another entry.
    """
    kernel = method.variant(method.n_planes * n_samples).kernel
    if (device, kernel, dtype) in _passed:
        return
    passed = None if is_simulated() else _mark(kernel, dtype, device)
    if passed is not None and compiled.kept(passed) is not None:
        _passed.add((device, kernel, dtype))
        return
    proj_dim = min(spec.proj_dim, COLUMNS) if spec.is_nested else spec.proj_dim
    n_rows = min(n_samples, ROWS, max(1, _ENTRIES // proj_dim))
    offset = 2**33 + 5 * project_slices.SLICE - STEP * n_rows // 2
    small = replace(
        spec,
        proj_dim=proj_dim,
        n_params=offset + STEP * n_rows,
        seed=0x243F6A8885A308D3,
        stream=0x13198A2E,
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
            "The compiler that numba-cuda finds and the driver must go together: install "
            "numba-cuda[cu13], or [cu12] for a driver of CUDA 12, or set CUDA_HOME to a toolkit, "
            "and compare `python -m numba -s` with `nvidia-smi`."
        )
        if isinstance(error, AttributeError | ImportError):  # seen with NumPy 2.5
            remedy = (
                "numba-cuda and the installed NumPy and numba must go together: "
                "`pip install 'trak-core[cuda]'` takes versions that do."
            )
        raise InputError(
            f"The kernel {method.name} must compile and run on {name_of(device)}. Found "
            f"{type(error).__name__}: {error}. {remedy} {INSTEAD}",
            code="projection.kernel_fails",
        ) from error
    expected = [projection_matrix(small, offset + int(g), 1)[0] for g in picks]
    wrong = matrix != np.array(expected, np.float32)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise InputError(
            f"The kernel {method.name} must make the matrix of the definition on every GPU. Found "
            f"on {name_of(device)}, with {dtype} gradients, {wrong.sum()} wrong of {wrong.size} "
            f"entries of the projection {spec.kind}, the first at coordinate "
            f"{offset + picks[row]}, column {column}: {matrix[row, column]} for "
            f"{expected[row][column]}. Project on the CPU, and please report this with the "
            "versions of numba-cuda and of the driver.",
            code="projection.kernel_differs",
        )
    _passed.add((device, kernel, dtype))
    if passed is not None:
        compiled.keep(passed, b"")


def _mark(kernel: variants.Kernel, dtype: torch.dtype, device: torch.device) -> Path:
    """Return the file that says that a kernel made the right matrix on this kind of GPU."""
    properties = torch.cuda.get_device_properties(device)
    return compiled.kept_path(
        ".right", kernel, str(dtype), properties.name, compiled.driver_version()
    )


@contextmanager
def _on(device: torch.device) -> Generator[None]:
    """Make a GPU the current one, and its context that of the thread."""
    if is_simulated():
        yield
        return
    with torch.cuda.device(device):
        compiled.make_current(device)
        yield


def project_cuda(blocks: Sequence[Any], spec: ProjectionSpec, offset: int, out: Tensor) -> None:
    """Add the unscaled projection of the gradient blocks to ``out``.

    Computes out += X R[offset : offset + n], X being the blocks side by side, with the matrix of
    ``reference.py`` bit for bit; the kernel that makes it here is compared with the definition
    before its first use. Sums are float32 (on tensor cores, float32 gradients count as the sum of
    two bfloat16 numbers, within 2^-18; infinities and NaN stay not finite). The same device gives
    the same bits, whatever the blocks and the batch are; several calls for chunks that end at
    multiples of 65536 give what one call gives. Work is queued on PyTorch's current stream; memory
    beyond the arguments stays below 256 MiB. Nothing is copied of blocks that a kernel can read in
    place.

    Args:
        blocks: Matrices (n_samples, n_i) of one dtype, float32, float16 or bfloat16, the first
            beginning at coordinate ``offset``, each following right after the last. CUDA tensors;
            CPU tensors under numba's simulator. Rows may be strided.
        spec: The projection; not of kind ``identity``.
        offset: Coordinate of the first column.
        out: Shape (n_samples, spec.proj_dim), float32, on the same device; may be strided.
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
