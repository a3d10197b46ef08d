"""Which kernel projects what: by the kind, the gradients' dtype and the GPU's capability."""

import torch

from trak_core.errors import InputError
from trak_core.projection.cuda import hadamard, portable, sjlt, slices, tensor_core
from trak_core.projection.cuda.machine import INSTEAD, capability_of
from trak_core.spec import ProjectionKind, ProjectionSpec

_TENSOR_CORES = (8, 0)  # the first capability that multiplies m16n8k16, and copies on its own


def choose(spec: ProjectionSpec, dtype: torch.dtype, device: torch.device) -> slices.Method:
    """Return the one method that projects gradients of a dtype on a device; there is no other try.

    Args:
        spec: The projection.
        dtype: Of the gradients.
        device: Where they are.

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
            if spec.proj_dim > slices.SLICE:
                raise InputError(
                    f"The projection kind hadamard needs proj_dim at most {slices.SLICE} on a "
                    f"GPU. Found {spec.proj_dim}. {INSTEAD}",
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
    return slices.Method(
        name=module.__name__.rpartition(".")[2],
        launcher=module.launcher(spec, bfloat16=bfloat16),
        dtype=torch.bfloat16 if n_planes == 2 else dtype,
        n_planes=n_planes,
        alignment=module.ALIGNMENT,
    )
