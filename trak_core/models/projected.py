"""Features: per-sample gradients projected piece by piece as they come."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from trak_core.one_pass.contributions import PIECE, Contribution, summed_parts
from trak_core.projection import project
from trak_core.spec import ProjectionSpec


class Features:
    """Adds up x R over the parameters, for one or several matrices R.

    The parameters lie side by side in the order they are given, each row-major. Small ones wait
    for each other, so that few calls project many; of large ones a part is formed at a time.

    Attributes:
        rows: Of each projection, shape (batch, proj_dim), float32, unscaled.
    """

    in_order: ClassVar[bool] = True

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projections: Sequence[ProjectionSpec],
        rows: Sequence[Tensor],
        threads: int,
    ):
        """Keep where they go."""
        self._parameters, self._projections = parameters, projections
        self.rows, self._threads = list(rows), threads
        self._offsets: dict[int, int] = {}
        offset = 0
        for parameter in parameters.values():
            self._offsets[id(parameter)] = offset
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
    ) -> Self:
        """Return zeros for so many samples, on the parameters' device."""
        device = next(iter(parameters.values())).device
        rows = [torch.zeros(n_samples, one.proj_dim, device=device) for one in projections]
        return cls(parameters, projections, rows, threads)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        """See ``Consumer``."""
        offset = self._offsets[id(parameter)]
        for first, part in summed_parts(uses, PIECE):
            part = part.float() if part.dtype is torch.float64 else part
            if sum(block.numel() for block in self._held.values()) + part.numel() > PIECE:
                self.finish()
            self._held[offset + first] = part

    def finish(self) -> None:
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

    def of(self, samples: slice) -> Self:
        """See ``SampleConsumer``."""
        rows = [one[samples] for one in self.rows]
        return type(self)(self._parameters, self._projections, rows, self._threads)

    def empty(self) -> Self:
        """See ``Consumer``."""
        rows = [torch.zeros_like(one) for one in self.rows]
        return type(self)(self._parameters, self._projections, rows, self._threads)

    def add(self, other: Self) -> None:
        """See ``Consumer``."""
        other.finish()
        for one, more in zip(self.rows, other.rows, strict=True):
            one += more

    def scaled(self) -> list[Tensor]:
        """Return the features, so that E<Rx, Ry> = <x, y>."""
        pairs = zip(self.rows, self._projections, strict=True)
        return [rows * projection.scale for rows, projection in pairs]
