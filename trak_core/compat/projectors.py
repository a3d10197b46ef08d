"""TRAK's projectors, which all apply one matrix.

An entry of the matrix is a function of the seed, the model id (the projection's stream), its row
and its column alone. Class, block size, chunks, dtype and device change nothing. Entries are
unscaled, and results are float32 for gradients of any dtype, so that nothing overflows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.gradients import as_blocks
from trak_core.projection import project
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionKind, ProjectionSpec

Gradients = Tensor | Mapping[str, Tensor]
Device = str | torch.device


class ProjectionType(StrEnum):
    """Distribution of the entries."""

    normal = "normal"
    rademacher = "rademacher"


def vectorize(
    g: Mapping[str, Tensor], arr: Tensor | None = None, device: Device = "cuda"
) -> Tensor:
    """Return gradients (B, *shape) flattened side by side, shape (B, p); (B,) is one column.

    They lie in ``arr`` if it is given, in a new tensor on ``device`` otherwise.
    """
    device = device if arr is None else arr.device
    flat = torch.cat([x.detach().reshape(len(x), -1).to(device) for x in g.values()], dim=1)
    return flat if arr is None else arr.copy_(flat)


class AbstractProjector(ABC):
    """From gradients of shape (B, grad_dim) to features of shape (B, proj_dim)."""

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int, proj_type: str, device: Device
    ) -> None:
        self.grad_dim, self.proj_dim = grad_dim, proj_dim
        self.seed, self.proj_type, self.device = seed, proj_type, device

    @abstractmethod
    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return features, shape (B, proj_dim), by the matrix that belongs to ``model_id``.

        Gradients have shape (B, grad_dim), or are names to tensors (B, *shape) flattened in order.
        """

    def free_memory(self) -> None:  # ruff: ignore[empty-method-without-abstract-decorator]
        """Free what can be made again."""


class NoOpProjector(AbstractProjector):
    """No projection: the gradients themselves, flattened."""

    def __init__(
        self,
        grad_dim: int = 0,
        proj_dim: int = 0,
        seed: int = 0,
        proj_type: str = "na",
        device: Device = "cuda",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, proj_type, device)

    def spec(self, model_id: int, n_params: int) -> ProjectionSpec:
        """Return the projection that changes nothing."""
        kind = ProjectionKind.IDENTITY
        return ProjectionSpec(kind=kind, n_params=n_params, proj_dim=n_params, seed=0, stream=0)

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the gradients, shape (B, p), where they are."""
        grads = {"": grads} if isinstance(grads, Tensor) else grads
        return vectorize(grads, device=next(iter(grads.values())).device)


class BasicProjector(AbstractProjector):
    """The projection on any device, without the matrix in memory.

    The seed, unsigned 64 bit, and the model id decide the matrix. ``dtype`` and ``max_batch_size``
    are not needed, and ``block_size`` is that of ``generate_sketch_matrix``.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        block_size: int = 100,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *,
        max_batch_size: int = 32,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, ProjectionType(proj_type), device)
        self.block_size, self.max_batch_size = min(proj_dim, block_size), max_batch_size
        self.dtype, self.model_id = dtype, model_id
        self.spec(0, grad_dim)  # refuses sizes and seeds out of range
        self.get_generator_states()

    def spec(self, model_id: int, n_params: int) -> ProjectionSpec:
        """Return the projection that belongs to a model id, for gradients of ``n_params``."""
        if n_params != self.grad_dim:
            words = (
                f"Gradients must have the projector's grad_dim, {self.grad_dim}. Found {n_params}."
            )
            raise InputError(words, code="compat.grad_dim")
        kind, k = ProjectionKind(str(self.proj_type)), self.proj_dim
        return ProjectionSpec(
            kind=kind, n_params=n_params, proj_dim=k, seed=self.seed, stream=model_id
        )

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        values = grads.values() if isinstance(grads, Mapping) else [grads]
        blocks = as_blocks(value.detach().to(self.device) for value in values)
        if model_id != self.model_id:
            self.free_memory()
        self.model_id = model_id
        spec = self.spec(model_id, sum(block.shape[1] for block in blocks))
        return project(blocks, spec, threads=torch.get_num_threads())

    def free_memory(self) -> None:
        """Drop ``proj_matrix``, which ``generate_sketch_matrix`` makes for the last model id."""
        vars(self).pop("proj_matrix", None)

    def get_generator_states(self) -> None:
        """Set ``generator_states``: the first column of each block."""
        self.generator_states = list(range(0, self.proj_dim, self.block_size))
        self.num_blocks = len(self.generator_states)

    def generate_sketch_matrix(self, generator_state: int = 0) -> None:
        """Set ``proj_matrix`` to one block of columns, shape (grad_dim, at most block_size)."""
        columns = slice(generator_state, generator_state + self.block_size)
        matrix = projection_matrix(self.spec(self.model_id, self.grad_dim))[:, columns]
        self.proj_matrix = torch.from_numpy(matrix).to(self.device, torch.float32)


class BasicSingleBlockProjector(BasicProjector):
    """The same, with the whole ``proj_matrix`` (grad_dim, proj_dim) of a model id in memory."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        **options: Any,
    ) -> None:
        options |= {"block_size": proj_dim, "dtype": dtype, "model_id": model_id}
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, **options)
        self.generate_sketch_matrix()


class CudaProjector(BasicProjector):
    """The projection by a CUDA kernel, without an extension to compile; batches have any size."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        max_batch_size: int = 32,
        **options: Any,
    ) -> None:
        if torch.device(device).type != "cuda":
            words = f"CudaProjector must have a CUDA device. Found {device!r}: take BasicProjector."
            raise InputError(words, code="compat.cuda_projector")
        options["max_batch_size"] = max_batch_size
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, **options)


class ChunkedCudaProjector(BasicProjector):
    """The projection of gradients that come in groups of parameters, names to (B, *shape).

    The groups stand side by side in one matrix, which has the first projector's seed.
    """

    def __init__(
        self,
        projector_per_chunk: Sequence[AbstractProjector],
        max_chunk_size: int,
        params_per_chunk: Sequence[int],
        feat_bs: int,
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        first, n_params = projector_per_chunk[0], int(sum(params_per_chunk))
        super().__init__(n_params, first.proj_dim, first.seed, first.proj_type, device, dtype=dtype)
        self.projector_per_chunk, self.max_chunk_size = projector_per_chunk, max_chunk_size
        self.params_per_chunk, self.feat_bs = params_per_chunk, feat_bs

    def allocate_input(self) -> None:
        """Do nothing: no buffer is needed."""
