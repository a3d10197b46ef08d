"""Which kernel projects what on which GPU, and whether it makes the right matrix there."""

import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from trak_core.errors import InputError
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionKind, ProjectionSpec

_LEAST_CAPABILITY = (7, 0)
_TENSOR_CORES = (8, 0)
_INSTEAD = "Or project on the CPU."

# How large the self-test is.
TEST_ROWS, TEST_STEP, TEST_COLUMNS = 32, 11, 515

_passed: set[tuple[Any, ...]] = set()


def is_simulated() -> bool:
    """Return whether numba stands in for the GPU in Python (NUMBA_ENABLE_CUDASIM=1)."""
    from numba import config

    return bool(config.ENABLE_CUDASIM)  # pyright: ignore[reportAttributeAccessIssue]


@cache
def require_numba_cuda() -> None:
    """Raise an error that explains unless kernels can be compiled and started here.

    Raises:
        InputError: If numba-cuda is missing, or does not find the driver or its compiler.
    """
    if importlib.util.find_spec("numba_cuda") is None and not is_simulated():
        raise InputError(
            "Projecting on a GPU needs the package numba-cuda. Found it not installed. "
            f"Run `pip install 'numba-cuda[cu13]'`. {_INSTEAD}"
        )
    from numba import cuda

    if is_simulated():
        return
    try:
        available = cuda.is_available()
        reason = "" if available else str(cuda.cuda_error() or "no GPU that numba can use")
    except Exception as error:
        available, reason = False, f"{type(error).__name__}: {error}"
    if not available:
        raise InputError(
            "Projecting on a GPU needs a CUDA driver, and a compiler that numba-cuda finds (the "
            f"packages of numba-cuda[cu13], or CUDA_HOME). Found: {reason}. {_INSTEAD}"
        )


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU; the simulator stands for one without tensor cores."""
    return _LEAST_CAPABILITY if is_simulated() else torch.cuda.get_device_capability(device)


def choose(spec: ProjectionSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the ``Method`` that projects gradients of a dtype on a device.

    Args:
        spec: The projection.
        dtype: Of the gradients.
        device: Where they are.

    Raises:
        InputError: If no kernel can: an old GPU, or a proj_dim too large for the kind.
    """
    from trak_core.projection.cuda import hadamard, portable, sjlt, tensor_core
    from trak_core.projection.cuda._slices import SLICE, Method

    capability = capability_of(device)
    if capability < _LEAST_CAPABILITY:
        raise InputError(
            "Projecting on a GPU needs compute capability {}.{} or later. ".format(
                *_LEAST_CAPABILITY
            )
            + "Found {}.{}. ".format(*capability)
            + _INSTEAD
        )
    bfloat16 = dtype is torch.bfloat16
    n_planes = 1
    match spec.kind:
        case ProjectionKind.RADEMACHER if capability >= _TENSOR_CORES:
            module, n_planes = tensor_core, 2 if dtype is torch.float32 else 1
        case ProjectionKind.RADEMACHER | ProjectionKind.NORMAL:
            module = portable
        case ProjectionKind.HADAMARD:
            if spec.proj_dim > SLICE:
                raise InputError(
                    f"The projection kind hadamard needs proj_dim at most {SLICE} on a GPU. "
                    f"Found {spec.proj_dim}. {_INSTEAD}"
                )
            module = hadamard
        case ProjectionKind.SJLT:
            module = sjlt
        case ProjectionKind.NONE:
            raise InputError(
                "The projection kind none has no kernel: the gradients are the result."
            )
    return Method(
        name=module.__name__.rpartition(".")[2],
        launcher=module.launcher(spec, bfloat16=bfloat16 or n_planes == 2),
        dtype=torch.bfloat16 if n_planes == 2 else dtype,
        n_planes=n_planes,
        alignment=module.ALIGNMENT,
        factor=spec.entry_factor,
    )


def require_right_matrix(
    spec: ProjectionSpec, dtype: torch.dtype, device: torch.device, n_samples: int
) -> None:
    """Compare the bits of R that a kernel makes with the definition, at its first use on a device.

    Rows that are zero but for a one pick out single rows of R, at coordinates beyond 2^32, across
    the edge of a slice and in all places of a block of 128.

    Args:
        spec: The projection that is to be computed.
        dtype: Of the gradients.
        device: Where they are.
        n_samples: How many rows they have: it decides which variant of a kernel runs.

    Raises:
        InputError: If any entry differs.
    """
    from trak_core.projection.cuda._slices import SLICE, project_slices

    method = choose(spec, dtype, device)
    kernel = method.launcher.kernel(method.n_planes * n_samples)
    if (str(device), kernel) in _passed:
        return
    proj_dim = min(spec.proj_dim, TEST_COLUMNS) if spec.is_nested else spec.proj_dim
    n_rows = min(n_samples, TEST_ROWS, max(1, 2**21 // proj_dim))
    offset = 2**33 + 5 * SLICE - TEST_STEP * n_rows // 2
    small = replace(
        spec,
        proj_dim=proj_dim,
        n_params=offset + TEST_STEP * n_rows,
        seed=0x243F6A8885A308D3,
        stream=0x13198A2E,
    )
    picks = TEST_STEP * np.arange(n_rows) + TEST_STEP // 2
    gradients = torch.zeros((n_rows, TEST_STEP * n_rows), dtype=dtype)
    gradients[range(n_rows), picks] = 1
    found = torch.zeros((n_rows, proj_dim), dtype=torch.float32, device=device)
    project_slices([gradients.to(device)], offset, found, choose(small, dtype, device))
    expected = [projection_matrix(small, offset + int(g), 1)[0] for g in picks]
    wrong = found.cpu().numpy() != np.array(expected, np.float32)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        where = "numba's simulator" if is_simulated() else torch.cuda.get_device_name(device)
        raise InputError(
            f"The kernel {method.name} must make the matrix of the definition on every GPU. Found "
            f"on {where}, with {dtype} gradients, {wrong.sum()} wrong of {wrong.size} entries of "
            f"the projection {spec.kind}, the first at coordinate {offset + picks[row]}, column "
            f"{column}: {found[row, column]} for {expected[row][column]}. Project on the CPU, and "
            "please report this with the versions of numba-cuda and of the driver."
        )
    _passed.add((str(device), kernel))
