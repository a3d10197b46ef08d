"""Project gradients with TRAK's classes, which all apply one matrix.

An entry of the matrix is a function of the seed, the model id (the projection's stream), its row
and its column alone. Class, block size, chunks, dtype and device change nothing. Entries are
unscaled, and results are float32 for gradients of any dtype, so that nothing overflows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
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
    blocks = [value.detach().reshape(len(value), -1) for value in g.values()]
    if arr is None:
        return torch.cat([block.to(device) for block in blocks], dim=1)
    first = 0
    for block in blocks:
        arr[:, first : first + block.shape[1]] = block
        first += block.shape[1]
    return arr


def _blocks(grads: Gradients, device: Device) -> list[Tensor]:
    """Return gradients as matrices side by side, in order, on ``device``."""
    values = grads.values() if isinstance(grads, Mapping) else [grads]
    return as_blocks(value.detach().to(device) for value in values)


class AbstractProjector(ABC):
    """From gradients of shape (B, grad_dim) to features of shape (B, proj_dim).

    The seed, unsigned 64 bit, and the model id decide the matrix.
    """

    def __init__(
        self, grad_dim: int, proj_dim: int, seed: int, proj_type: str, device: Device
    ) -> None:
        self.grad_dim = grad_dim
        self.proj_dim = proj_dim
        self.seed = seed
        self.proj_type = proj_type
        self.device = device

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

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        """Return the gradients, shape (B, p), where they are."""
        if isinstance(grads, Tensor):
            return grads.reshape(len(grads), -1)
        return vectorize(grads, device=next(iter(grads.values())).device)


class _MatrixProjector(AbstractProjector):
    """What the projectors with a matrix share: ``spec``, and the projection without the matrix.

    ``block_size``, ``dtype`` and ``max_batch_size`` change no entry of it. Each class takes them,
    so that one call serves several classes.
    """

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        dtype: torch.dtype,
        model_id: int = 0,
    ) -> None:
        super().__init__(grad_dim, proj_dim, seed, ProjectionType(proj_type), device)
        self.dtype = dtype
        self.model_id = model_id
        self.spec(0)  # refuses sizes and seeds out of range

    def spec(self, model_id: int) -> ProjectionSpec:
        """Return the projection that belongs to a model id."""
        return ProjectionSpec(
            kind=ProjectionKind(str(self.proj_type)),
            n_params=self.grad_dim,
            proj_dim=self.proj_dim,
            seed=self.seed,
            stream=model_id,
        )

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        blocks = _blocks(grads, self.device)
        n_columns = sum(block.shape[1] for block in blocks)
        if n_columns != self.grad_dim:
            raise InputError(
                f"The projector's grad_dim is {self.grad_dim}, so gradients must have that many "
                f"entries a sample. Found {n_columns}.",
                code="compat.grad_dim",
            )
        self.model_id = model_id
        return project(blocks, self.spec(model_id), threads=torch.get_num_threads())


class BasicSingleBlockProjector(_MatrixProjector):
    """The projection by one product with ``proj_matrix`` (grad_dim, proj_dim) in memory."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        *,
        block_size: int | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Make the matrix that belongs to ``model_id``."""
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self.generate_sketch_matrix()

    def generate_sketch_matrix(self) -> None:
        """Make ``proj_matrix`` for the current ``model_id``."""
        spec = self.spec(self.model_id)
        # In float32, because half precision would round the entries of a normal matrix.
        shape = self.grad_dim, self.proj_dim
        self.proj_matrix = torch.empty(shape, dtype=torch.float32, device=self.device)
        for first in range(0, self.grad_dim, 4096):
            rows = projection_matrix(spec, first, min(4096, self.grad_dim - first))
            self.proj_matrix[first : first + 4096] = torch.from_numpy(rows.astype(np.float32))
        self.proj_matrix_available = True

    def free_memory(self) -> None:
        """Drop the matrix; it is made again when needed."""
        if self.proj_matrix_available:
            del self.proj_matrix
            self.proj_matrix_available = False

    def project(self, grads: Gradients, model_id: int) -> Tensor:
        if model_id != self.model_id or not self.proj_matrix_available:
            self.model_id = model_id
            self.generate_sketch_matrix()
        return torch.cat(_blocks(grads, self.device), dim=1).float() @ self.proj_matrix


class BasicProjector(_MatrixProjector):
    """The projection on any device, without the matrix in memory.

    Example:
        >>> import torch
        >>> projector = BasicProjector(6, 4, seed=0, proj_type="rademacher", device="cpu")
        >>> projector.project(torch.ones(2, 6), model_id=0).shape
        torch.Size([2, 4])
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
        max_batch_size: int | None = None,
    ) -> None:
        """Keep ``block_size`` for ``generate_sketch_matrix``."""
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self.block_size = min(proj_dim, block_size)
        self.num_blocks = -(-proj_dim // self.block_size)
        self.get_generator_states()

    def get_generator_states(self) -> None:
        """Set ``generator_states``: the first column of each block."""
        self.generator_states = [i * self.block_size for i in range(self.num_blocks)]

    def generate_sketch_matrix(self, generator_state: int) -> None:
        """Set ``proj_matrix`` to one block of columns, shape (grad_dim, at most block_size)."""
        last = min(generator_state + self.block_size, self.proj_dim)
        matrix = projection_matrix(self.spec(self.model_id))[:, generator_state:last]
        self.proj_matrix = torch.from_numpy(matrix).to(self.device, self.dtype)


class CudaProjector(_MatrixProjector):
    """The projection by a CUDA kernel, without an extension to compile."""

    def __init__(
        self,
        grad_dim: int,
        proj_dim: int,
        seed: int,
        proj_type: str,
        device: Device,
        max_batch_size: int = 32,
        *,
        dtype: torch.dtype = torch.float32,
        model_id: int = 0,
        block_size: int | None = None,
    ) -> None:
        """Take a CUDA device, or raise a ``ValueError``; batches of any size are projected."""
        super().__init__(grad_dim, proj_dim, seed, proj_type, device, dtype, model_id)
        self.max_batch_size = max_batch_size
        if torch.device(device).type != "cuda":
            raise InputError(
                f"CudaProjector must have a CUDA device. Found {device!r}; BasicProjector makes "
                "the same matrix on any device.",
                code="compat.cuda_projector",
            )


class ChunkedCudaProjector(_MatrixProjector):
    """The projection of gradients that come in groups of parameters, names to (B, *shape).

    The groups stand side by side in one matrix, which has the first projector's seed. So the
    result is that of one projector for all parameters.
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
        super().__init__(n_params, first.proj_dim, first.seed, first.proj_type, device, dtype)
        self.projector_per_chunk = list(projector_per_chunk)
        self.params_per_chunk = list(params_per_chunk)
        self.max_chunk_size = max_chunk_size
        self.feat_bs = feat_bs

    def allocate_input(self) -> None:
        """Do nothing: no buffer is needed."""


def known_projection(
    projector: AbstractProjector, n_params: int, model_id: int
) -> ProjectionSpec | None:
    """Return the projection that a projector applies; None for a class of the user's own.

    ``n_params`` is the size of a gradient, which the projector that doesn't project cannot know.
    """
    if type(projector) is NoOpProjector:
        kind = ProjectionKind.IDENTITY
        return ProjectionSpec(
            kind=kind, n_params=n_params, proj_dim=n_params, seed=0, stream=model_id
        )
    if isinstance(projector, _MatrixProjector) and type(projector) in _OWN:
        return projector.spec(model_id)
    return None


def formless_projection(
    projector: AbstractProjector, n_params: int, model_id: int, device: torch.device
) -> ProjectionSpec | None:
    """Return the projection that a projector applies, if it needs no whole gradients for it.

    None for a projector with its matrix in memory, on another device than ``device``, of a class
    of the user's own, or with a ``project`` that somebody replaced.
    """
    if isinstance(projector, NoOpProjector | BasicSingleBlockProjector):
        return None
    spec = known_projection(projector, n_params, model_id)
    fits = spec is not None and spec.n_params == n_params and "project" not in vars(projector)
    return spec if fits and torch.device(projector.device).type == device.type else None


# Their subclasses may do anything.
_OWN = (BasicSingleBlockProjector, BasicProjector, CudaProjector, ChunkedCudaProjector)
