"""Choose the kernel for a kind, dtype and GPU, and test its matrix there before its first use."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from trak_core.errors import InputError
from trak_core.projection.cuda import hadamard, portable, project_slices, sjlt, tensor_core
from trak_core.projection.cuda.availability import INSTEAD, capability_of, name_of
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionKind, ProjectionSpec

_TENSOR_CORES = (8, 0)  # the first capability that multiplies m16n8k16, and copies on its own


def choose(spec: ProjectionSpec, dtype: torch.dtype, device: torch.device) -> project_slices.Method:
    """Return the one method that projects gradients of a dtype on a device; there is no other try.

    Raises:
        InputError: If no kernel can: an old GPU, a kind without kernels, or a proj_dim too large.
    """
    capability = capability_of(device)
    n_planes = 1
    match spec.kind:
        case ProjectionKind.RADEMACHER if capability >= _TENSOR_CORES:
            module, n_planes = tensor_core, 2 if dtype is torch.float32 else 1
        case ProjectionKind.RADEMACHER | ProjectionKind.NORMAL:
            module = portable
        case ProjectionKind.HADAMARD:
            if spec.proj_dim > project_slices.SLICE:
                raise InputError(
                    "The projection kind hadamard needs proj_dim at most "
                    f"{project_slices.SLICE} on a GPU. Found {spec.proj_dim}. {INSTEAD}",
                    code="projection.gpu_proj_dim",
                )
            module = hadamard
        case ProjectionKind.SJLT:
            module = sjlt
        case kind:
            raise InputError(
                "The projection's kind must be one that has a kernel for GPUs. Found "
                f"{kind}. {INSTEAD}",
                code="projection.gpu_kind",
            )
    bfloat16 = dtype is torch.bfloat16 or n_planes == 2
    return project_slices.Method(
        name=module.__name__.rpartition(".")[2],
        variant=partial(module.variant, spec, bfloat16),
        dtype=torch.bfloat16 if n_planes == 2 else dtype,
        n_planes=n_planes,
        alignment=module.ALIGNMENT,
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
    the edge of a slice and in all places of a block of 128.

    Args:
        method: What ``choose`` returned for the spec, dtype and device.
        spec: The projection.
        dtype: The dtype of the gradients.
        device: Where they are.
        n_samples: The gradients' rows; their number decides which variant of a kernel runs.

    Raises:
        InputError: If the kernel cannot be compiled or started, or if any entry differs.
    """
    kernel = method.variant(method.n_planes * n_samples).kernel
    if (str(device), kernel) in _passed:
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
        raise InputError(
            f"The kernel {method.name} must compile and run on {name_of(device)}. Found "
            f"{type(error).__name__}: {error}. The compiler that numba-cuda finds and the driver "
            f"must go together: compare `python -m numba -s` with `nvidia-smi`. {INSTEAD}",
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
    _passed.add((str(device), kernel))
