"""The functions of ``trak.utils``, for code that calls them. This package does not use them."""

import tempfile
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from trak_core.compat.projectors import vectorize
from trak_core.compat.score_computers import (
    get_free_memory,
    get_matrix_mult,
    get_matrix_mult_blockwise,
    get_matrix_mult_standard,
    get_output_memory,
)
from trak_core.compat.traker import TRAKer

__all__ = ["get_free_memory", "get_num_params", "get_output_memory", "get_parameter_chunk_sizes"]
__all__ += ["get_matrix_mult", "get_matrix_mult_blockwise", "get_matrix_mult_standard"]
__all__ += ["is_not_buffer", "parameters_to_vector", "test_install", "vectorize"]


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return the entries of all tensors as one tensor, shape (p,)."""
    return torch.cat([parameter.reshape(-1) for parameter in parameters])


def get_num_params(model: nn.Module) -> int:
    """Return the total number of entries in a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def is_not_buffer(ind: int, params_dict: Sequence[str]) -> bool:
    """Return whether ``params_dict[ind]`` is not the name of a running statistic of BatchNorm."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return not any(name in params_dict[ind] for name in statistics)


def get_parameter_chunk_sizes(model: nn.Module, batch_size: int) -> tuple[int, list[int]]:
    """Return the maximum number of entries in ``trak``'s chunks, and the size of each chunk."""
    largest = (2**32 - 1) // batch_size
    chunks = [0]
    for size in (parameter.numel() for parameter in model.parameters()):
        if chunks[-1] and chunks[-1] + size >= largest:
            chunks.append(0)
        chunks[-1] += size
    return largest, chunks


def test_install(use_fast_jl: bool = True) -> None:  # ruff: ignore[pytest-parameter-with-default-argument]
    """Test ``TRAKer`` with a tiny model, on a GPU if there is one and ``use_fast_jl`` is true."""
    device = "cuda" if use_fast_jl and torch.cuda.is_available() else "cpu"
    if use_fast_jl and device == "cpu":
        print("There is no CUDA device, so only the CPU code is tested, not the CUDA kernel:")
    model = nn.Linear(256, 2, bias=False).to(device)
    images, labels = torch.eye(20, 256, device=device), torch.arange(20, device=device) % 2
    with tempfile.TemporaryDirectory() as folder:
        options = {"train_set_size": 20, "save_dir": folder, "device": device, "proj_dim": 512}
        tracer = TRAKer(model, "image_classification", logging_level=100, **options)
        tracer.load_checkpoint(model.state_dict(), model_id=0)
        tracer.featurize((images, labels), num_samples=20)
    print(f"trak_core.compat works on {device}.")
