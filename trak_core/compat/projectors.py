"""Project gradients with the projector classes of ``trak``, which all use the same random matrix.

An entry of the matrix depends only on the distribution, the seed, the model id, the row and the
column. The matrix is not scaled. Features are float32 for gradients of any dtype, because float16
could overflow.
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
from trak_core.settings import ProjectionKind, ProjectionSpec

Gradients = Tensor | Mapping[str, Tensor]
Device = str | torch.device


class ProjectionType(StrEnum):
    """The distribution of the entries of the projection matrix."""

    normal = "normal"
    rademacher = "rademacher"


def vectorize(
    g: Mapping[str, Tensor], arr: Tensor | None = None, device: Device = "cuda"
) -> Tensor:
    """Return gradients, a dict with a tensor (B, *shape) for each parameter, as one tensor (B, p).

    If ``arr`` is given, the result is written into this tensor.
    """
    device = device if arr is None else arr.device
    flat = torch.cat([x.detach().reshape(len(x), -1).to(device) for x in g.values()], dim=1)
    return flat if arr is None else arr.copy_(flat)


class AbstractProjector(ABC):
    """The base class of projectors from gradients (B, grad_dim) to features (B, proj_dim)."""

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int, proj_type: str, device: Device
    ) -> None:
        self.grad_dim, self.proj_dim = grad_dim, proj_dim
        self.seed, self.proj_type, self.device = seed, proj_type, device

    @abstractmethod
    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the product of gradients and the matrix of ``model_id``, shape (B, proj_dim).

        ``grads`` is a tensor (B, grad_dim), or a dict with a tensor (B, *shape) for each parameter.
        """

    def free_memory(self) -> None:  # ruff: ignore[empty-method-without-abstract-decorator]
        """Delete tensors that can be computed again, to free memory."""


class NoOpProjector(AbstractProjector):
    """A projector that returns the flattened gradients without projecting them."""

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
        """Return the definition of the identity projection."""
        kind = ProjectionKind.IDENTITY
        return ProjectionSpec(kind=kind, n_params=n_params, proj_dim=n_params, seed=0, stream=0)

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the gradients as one tensor, shape (B, p), on their device."""
        grads = {"": grads} if isinstance(grads, Tensor) else grads
        return vectorize(grads, device=next(iter(grads.values())).device)


class BasicProjector(AbstractProjector):
    """A projector for any device, which never stores the whole matrix in memory.

    ``dtype`` and ``max_batch_size`` are ignored.
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
        self.spec(0, grad_dim)  # Raises an error if a size or the seed is out of range.
        self.get_generator_states()

    def spec(self, model_id: int, n_params: int) -> ProjectionSpec:
        """Return the definition of a model id's projection of ``n_params`` = grad_dim entries."""
        if n_params != self.grad_dim:
            message = f"Gradients must have {self.grad_dim} entries (grad_dim). Found {n_params}."
            raise InputError(message, code="compat.grad_dim")
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
        """Delete ``proj_matrix``, which ``generate_sketch_matrix`` sets."""
        vars(self).pop("proj_matrix", None)

    def get_generator_states(self) -> None:
        """Set ``generator_states`` to the numbers of the first columns of the matrix's blocks."""
        self.generator_states = list(range(0, self.proj_dim, self.block_size))
        self.num_blocks = len(self.generator_states)

    def generate_sketch_matrix(self, generator_state: int = 0) -> None:
        """Set ``proj_matrix`` to the block of columns that begins at column ``generator_state``."""
        columns = slice(generator_state, generator_state + self.block_size)
        matrix = projection_matrix(self.spec(self.model_id, self.grad_dim))[:, columns]
        self.proj_matrix = torch.from_numpy(matrix).to(self.device, torch.float32)


class BasicSingleBlockProjector(BasicProjector):
    """A ``BasicProjector`` that also keeps the whole matrix (grad_dim, proj_dim) in memory."""

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
    """A ``BasicProjector`` that requires a CUDA device. Batches can have any size."""

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
            message = f"CudaProjector needs a CUDA device. Found {device!r}. Use BasicProjector."
            raise InputError(message, code="compat.cuda_projector")
        options["max_batch_size"] = max_batch_size
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, **options)


class ChunkedCudaProjector(BasicProjector):
    """A projector that is created from a list of projectors for chunks of the parameters.

    All of them must have the same settings.
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
        """Do nothing. The method exists because ``trak`` has it, but no buffer is needed."""
