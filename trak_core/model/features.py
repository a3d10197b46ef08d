"""Project per-sample gradients piece by piece as they come: the features of samples."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from trak_core.autograd.contributions import PIECE, Contribution, Lookup, Outer, summed_parts
from trak_core.model.device import find_device, takes_cuda
from trak_core.projection import NotFiniteError, OuterProducts, prefers_factors, project
from trak_core.spec import ProjectionSpec, matrix_shape


class Features:
    """Adds up x R over the parameters, for one or several matrices R of one kind.

    The parameters lie side by side in the order they are given, each row-major. Gradients are
    formed a part at a time, and small ones wait for each other, so that few calls project many; for
    a tensor sketch their factors will do, where that is cheaper, and where entries aren't scaled.

    Attributes:
        rows: Of each projection, shape (batch, proj_dim), float32, unscaled; without ``products``.
        products: Of each projection, what was sketched by its factors; empty for other kinds.
    """

    in_order: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projections: Sequence[ProjectionSpec],
        rows: Sequence[Tensor],
        threads: int,
        scales: Mapping[str, Tensor] | None = None,
    ):
        """Keep where they go."""
        self._parameters, self._projections, self._scales = parameters, projections, scales
        self.rows, self._threads = list(rows), threads
        self.products = [
            OuterProducts(one, len(rows), rows.device)
            for one, rows in zip(projections, self.rows, strict=True)
            if one.kind.about.of_matrices
        ]
        # First coordinate, and the number among those with entries.
        self._places: dict[int, tuple[int, int]] = {}
        named = {} if scales is None else scales
        self._scale_of = {id(parameters[name]): one.flatten() for name, one in named.items()}
        offset = 0
        for number, parameter in enumerate(p for p in parameters.values() if p.numel()):
            self._places[id(parameter)] = offset, number
            offset += parameter.numel()
        # What waits, by its first coordinate.
        self._held: dict[int, Tensor] = {}

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        projections: Sequence[ProjectionSpec],
        n_samples: int,
        threads: int,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return zeros for so many samples, on the parameters' device.

        Args:
            parameters: Those to differentiate.
            projections: Of one kind.
            n_samples: How many.
            threads: For the projection.
            scales: By name, what to multiply each entry of the gradients by; None for nothing.
        """
        device = next(iter(parameters.values())).device
        rows = [torch.zeros(n_samples, one.proj_dim, device=device) for one in projections]
        return cls(parameters, projections, rows, threads, scales)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """See ``Consumer``."""
        if not parameter.numel():
            return
        offset, number = self._places[id(parameter)]
        scale = self._scale_of.get(id(parameter))
        if self.products and scale is None:
            shape = matrix_shape(parameter.shape)
            uses = [use for use in uses if not self._sketched(number, shape, use)]
            if not uses:
                return
        for first, part in summed_parts(uses, PIECE):
            part = part.float() if part.dtype is torch.float64 else part
            if scale is not None:
                part = part * scale[first : first + part.shape[1]]
            if sum(block.numel() for block in self._held.values()) + part.numel() > PIECE:
                self._project_held()
            self._held[offset + first] = part

    def _sketched(self, number: int, shape: tuple[int, int], use: Contribution) -> bool:
        """Sketch a use by its factors if that is cheaper, and say so."""
        if use.matrix != shape:
            return False
        if isinstance(use, Lookup):
            for sums in self.products:
                sums.add_lookups(number, use.indices, use.gradients[0])
            return True
        if not isinstance(use, Outer):
            return False
        n_samples, n_tokens, _ = use.inputs.shape
        if not prefers_factors(n_samples, n_tokens, *shape, self._projections[0].proj_dim):
            return False
        left, right = use.inputs, use.gradients[0]
        for sums in self.products:
            sums.add_products(number, *((right, left) if use.is_transposed else (left, right)))
        return True

    def _project_held(self) -> None:
        """Project what waits, as few runs of coordinates that follow one another."""
        run: list[Tensor] = []
        start = stop = 0
        for first in sorted(self._held):
            block = self._held[first]
            if run and (first != stop or block.dtype != run[0].dtype):
                self._project(run, start)
                run = []
            start = start if run else first
            run.append(block)
            stop = first + block.shape[1]
        if run:
            self._project(run, start)
        self._held = {}

    def _project(self, blocks: list[Tensor], offset: int) -> None:
        for projection, rows in zip(self._projections, self.rows, strict=True):
            project(
                blocks, projection, offset=offset, out=rows, accumulate=True, threads=self._threads
            )

    def finish(self) -> None:
        """See ``SampleConsumer``."""
        self._project_held()
        for rows, sums in zip(self.rows, self.products, strict=False):
            rows += sums.total()
        self.products = []

    def of(self, samples: slice) -> Self:
        """See ``SampleConsumer``."""
        return self._with([one[samples] for one in self.rows])

    def empty(self) -> Self:
        """See ``Consumer``."""
        return self._with([torch.zeros_like(one) for one in self.rows])

    def _with(self, rows: Sequence[Tensor]) -> Self:
        what = self._parameters, self._projections, rows, self._threads, self._scales
        return type(self)(*what)

    def add(self, other: Self) -> None:
        """See ``Consumer``."""
        other.finish()
        for one, more in zip(self.rows, other.rows, strict=True):
            one += more

    def scaled(self) -> list[Tensor]:
        """Return the features, so that E<Rx, Ry> = <x, y>.

        Raises:
            NotFiniteError: If they have NaN or infinity in them.
        """
        if not all(rows.isfinite().all() for rows in self.rows):
            raise NotFiniteError("Features must be finite. Found NaN or infinity.")
        pairs = zip(self.rows, self._projections, strict=True)
        return [rows * projection.scale for rows, projection in pairs]


def projecting_device(name: str) -> torch.device:
    """Return the device that a config names, with all that projecting on it needs.

    Raises:
        InputError: If there is none, or if numba-cuda is missing.
    """
    if takes_cuda(name):
        # Only here: a machine without CUDA needs none. Better now than after a wait for a GPU.
        from trak_core.projection.cuda.machine import require_numba_cuda

        require_numba_cuda()
    return find_device(name)


def compilers(device: torch.device) -> tuple[str, ...]:
    """Return the packages that compile the projection's kernels, for an artifact's provenance."""
    return ("numba", "numba-cuda") if device.type == "cuda" else ("numba",)
