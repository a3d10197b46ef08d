"""Compute features by projecting per-sample gradients piece by piece, as they come."""

import copy
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import scaled_integers
from trak_core.attribution.device import find_device, takes_cuda
from trak_core.errors import InputError, listed
from trak_core.gradients import Batch, GradientMethod, explain_not_finite
from trak_core.gradients.gradient_terms import Contribution, Lookup, Outer, piece_on, summed_parts
from trak_core.gradients.margins_in_pieces import MarginFactors
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.projection import OuterProducts, add_projection, prefers_factors
from trak_core.spec import ProjectionSpec, matrix_shape

# The part of a sample's features, by their norm, that may be lost where they are stored. Rounding
# to float16 costs 5e-4 at most, more is lost where entries fall below 6e-5 or overflow. Rounding
# entries alike in size to int8 costs 1e-2; one far larger than the others leaves them few steps.
_MOST_LOST = {"float16": 1e-3, "int8": 2e-2}

# Up to this number of entries, parts are copied into one tensor, which is projected at once.
_JOINED = 2**18


class Features:
    """A consumer of gradients that adds up x R over the parameters.

    A gradient method goes backwards through the model and hands each parameter's gradients, of all
    samples of a batch, to ``take``. After it ``finish`` projects what still waits.

    The parameters lie side by side in the order they are given, each row-major. Gradients are
    formed a part at a time, and small parts wait, so that one call projects many. A tensor sketch
    takes factors of gradients instead, where that is cheaper and entries aren't scaled.

    Attributes:
        rows: Shape (batch, proj_dim), float32, unscaled; without ``products``.
        products: The sum of what was sketched by factors; None for other kinds.
    """

    in_order: ClassVar[bool] = True
    reads_terms: ClassVar[bool] = False

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        rows: Tensor,
        threads: int,
        scales: Mapping[str, Tensor] | None = None,
    ):
        self._projection, self._threads = projection, threads
        # First coordinate, and the number among the parameters with entries.
        self._places: dict[int, tuple[int, int]] = {}
        self._scale_of = {
            id(parameters[name]): scale.flatten() for name, scale in (scales or {}).items()
        }
        offset = 0
        for number, parameter in enumerate(p for p in parameters.values() if p.numel()):
            self._places[id(parameter)] = offset, number
            offset += parameter.numel()
        self._begin(rows)

    def _begin(self, rows: Tensor) -> None:
        """Add to these rows from now on."""
        of_matrices = self._projection.kind.about.of_matrices
        self.rows = rows
        self.products = (
            OuterProducts(self._projection, len(rows), rows.device) if of_matrices else None
        )
        # Parts that wait, by their first coordinate, and their entries.
        self._held: dict[int, Tensor] = {}
        self._n_held = 0

    @classmethod
    def zeros(
        cls,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        n_samples: int,
        threads: int,
        scales: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Return zeros for ``n_samples`` samples, on the parameters' device.

        ``scales`` are factors of the gradients' entries, by the parameter's name.
        """
        device = next(iter(parameters.values())).device
        rows = torch.zeros(n_samples, projection.proj_dim, device=device)
        return cls(parameters, projection, rows, threads, scales)

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        offset, number = self._places[id(parameter)]
        scale = self._scale_of.get(id(parameter))
        if self.products is not None and scale is None:
            shape = matrix_shape(parameter.shape)
            uses = [use for use in uses if not self._sketched(self.products, number, shape, use)]
            if not uses:
                return
        for first, part in summed_parts(uses):
            part = part.float() if part.dtype is torch.float64 else part
            if scale is not None:
                part = part * scale[first : first + part.shape[1]]
            if self._n_held + part.numel() > piece_on(part.device):
                self._project_held()
            self._held[offset + first] = part
            self._n_held += part.numel()

    def _sketched(
        self, products: OuterProducts, number: int, shape: tuple[int, int], use: Contribution
    ) -> bool:
        """Sketch a use by its factors if that is cheaper; return whether it was."""
        if use.matrix != shape:
            return False
        if isinstance(use, Lookup):
            products.add_lookups(number, use.indices, use.gradients[0])
            return True
        if isinstance(use, Outer):
            n_tokens, outers = use.inputs.shape[1], [use]
        elif isinstance(use, MarginFactors):
            n_tokens, outers = use.n_tokens, use.outers()
        else:
            return False
        if not prefers_factors(use.n_rows, n_tokens, *shape, self._projection.proj_dim):
            return False
        for outer in outers:
            factors = outer.inputs, outer.gradients[0]
            products.add_products(number, *(reversed(factors) if outer.is_transposed else factors))
        return True

    def _project_held(self) -> None:
        """Project the parts that wait, in few runs of consecutive coordinates."""
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
        self._held, self._n_held = {}, 0

    def _project(self, blocks: list[Tensor], offset: int) -> None:
        if len(blocks) > 1 and sum(block.numel() for block in blocks) <= _JOINED:
            blocks = [torch.cat(blocks, dim=1)]
        add_projection(blocks, self._projection, offset, self.rows, self._threads)

    def finish(self) -> None:
        self._project_held()
        if self.products is not None:
            self.rows += self.products.total()
        self.products = None

    def of(self, samples: slice) -> Self:
        return self._with(self.rows[samples])

    def empty(self) -> Self:
        return self._with(torch.zeros_like(self.rows))

    def _with(self, rows: Tensor) -> Self:
        other = copy.copy(self)
        other._begin(rows)
        return other

    def add(self, other: Self) -> None:
        other.finish()
        self.rows += other.rows

    def scaled(self) -> Tensor:
        """Return the features, so that E<Rx, Ry> = <x, y>."""
        return self.rows * self._projection.scale


def batch_features(
    method: GradientMethod,
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    batch: Batch,
    projection: ProjectionSpec,
    ids: Sequence[object],
    threads: int,
    scales: Mapping[str, Tensor] | None,
    *,
    is_scaled: bool = True,
) -> tuple[np.ndarray, list[Tensor]]:
    """Return features, shape (batch, proj_dim), float32; label numbers and ``PerSample.columns``.

    Features are x R of gradients x, times the projection's scale unless ``is_scaled`` is False. If
    something is not finite, the ``InputError`` names the samples, by ``ids``, and parameters.
    """
    sums = Features.zeros(parameters, projection, len(batch), threads, scales)
    columns = method(model, parameters, output, batch, sums)
    # A GPU is waited for from here on, and nowhere before.
    rows = (sums.scaled() if is_scaled else sums.rows).cpu().numpy()
    if not (np.isfinite(rows).all() and columns[0].isfinite().all()):
        explain_not_finite(model, parameters, output, batch, ids)
        raise InputError(
            "Features must be finite. Found NaN or infinity where gradients are finite: their sums "
            "overflow float32.",
            code="projection.not_finite",
        )
    numbers = torch.vmap(output.label_number)(batch.labels)
    return rows, [numbers, *columns]


def stored_rows(rows: np.ndarray, dtype: str, sample_ids: Sequence[object]) -> np.ndarray:
    """Return the rows as they are read when they were stored in a dtype, which must hold them."""
    if dtype == "float32":
        return rows
    exact = rows.astype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == "int8":
            whole, scales = scaled_integers(rows)
            stored = whole * scales[:, None]
        else:
            stored = rows.astype(np.float16)
        losses, norms = (np.linalg.norm(v, axis=1) for v in (stored - exact, exact))
        lost = ~(losses <= _MOST_LOST[dtype] * norms)
    named = listed(sample_ids[i] for i in np.flatnonzero(lost).tolist())
    if named and dtype == "int8":
        raise InputError(
            "Features stored as int8 must keep a sample's features to 2e-2 of their norm: no entry "
            "may be far larger than the others. Found a loss of up to "
            f"{(losses[lost] / norms[lost]).max():.2g} in the samples {named}. "
            "Set features_dtype to float16 or float32.",
            code="stages.int8",
        )
    if named:
        size = np.abs(rows[lost])
        raise InputError(
            "Features stored as float16 must keep a sample's features to 1e-3 of their norm: "
            "entries of 6e-5 to 65504. Found entries from "
            f"{size[size > 0].min():.2g} to {size.max():.2g} in the samples {named}. "
            "Set features_dtype to float32.",
            code="stages.float16",
        )
    return stored


def projecting_device(name: str) -> torch.device:
    """Return the device that a config names, after a check that projection works on it."""
    if takes_cuda(name):
        # Imported here because only CUDA needs it; checked before the wait for a GPU.
        from trak_core.projection.cuda.project import require_numba_cuda

        require_numba_cuda()
    return find_device(name)


def compilers(device: torch.device) -> tuple[str, ...]:
    """Return the packages that compile the projection's kernels, for an artifact's provenance."""
    return ("numba", "numba-cuda") if device.type == "cuda" else ("numba",)
