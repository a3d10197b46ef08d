"""Parameters and gradients as flat vectors, and products of matrices that may not fit a GPU."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return tensors flattened, one after the other, shape (p,)."""
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: nn.Module) -> int:
    """Return the number of entries of all of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def vectorize(
    g: Mapping[str, Tensor], arr: Tensor | None = None, device: str | torch.device = "cuda"
) -> Tensor:
    """Return gradients (B, *shape) flattened side by side, shape (B, p).

    Args:
        g: Names to tensors; (B,) counts as one entry a sample.
        arr: Where to write; made on ``device`` if None.
        device: Of the result.
    """
    blocks = [value.detach().reshape(len(value), -1) for value in g.values()]
    if arr is None:
        return torch.cat([block.to(device) for block in blocks], dim=1)
    first = 0
    for block in blocks:
        arr[:, first : first + block.shape[1]] = block.to(device)
        first += block.shape[1]
    return arr


def get_output_memory(features: Tensor, target_grads: Tensor, target_dtype: torch.dtype) -> int:
    """Return the bytes of ``features @ target_grads.T``."""
    return len(features) * len(target_grads) * target_dtype.itemsize


def get_free_memory(device: torch.device) -> int:
    """Return the bytes that torch has reserved on a CUDA device and not used."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def get_matrix_mult_standard(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype
) -> Tensor:
    """Return ``features @ target_grads.T`` in ``target_dtype``, summed in float32 at least."""
    wide = torch.promote_types(features.dtype, torch.float32)
    return (features.to(wide) @ target_grads.to(wide).T).to(target_dtype)


def get_matrix_mult_blockwise(
    features: Tensor, target_grads: Tensor, target_dtype: torch.dtype, bs: int
) -> Tensor:
    """Return the product on the CPU, made ``bs`` rows and columns at a time, on a GPU if any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    output = torch.empty((len(features), len(target_grads)), dtype=target_dtype)
    for i in range(0, len(features), bs):
        rows = features[i : i + bs].to(device)
        for j in range(0, len(target_grads), bs):
            block = get_matrix_mult_standard(
                rows, target_grads[j : j + bs].to(device), target_dtype
            )
            output[i : i + bs, j : j + bs] = block.cpu()
    return output


def get_matrix_mult(
    features: Tensor,
    target_grads: Tensor,
    target_dtype: torch.dtype | None = None,
    batch_size: int = 8096,
    use_blockwise: bool = False,
) -> Tensor:
    """Return ``features @ target_grads.T``, in blocks if asked for or if it doesn't fit the GPU.

    Args:
        features: Shape (n, k).
        target_grads: Shape (m, k).
        target_dtype: Of the result; that of the features if None.
        batch_size: Rows and columns of a block.
        use_blockwise: Work in blocks and return a tensor on the CPU.
    """
    dtype = features.dtype if target_dtype is None else target_dtype
    on_gpu = features.device.type == "cuda"
    too_large = on_gpu and get_output_memory(features, target_grads, dtype) >= get_free_memory(
        features.device
    )
    if use_blockwise or too_large:
        return get_matrix_mult_blockwise(features, target_grads, dtype, batch_size)
    return get_matrix_mult_standard(features, target_grads, dtype)
