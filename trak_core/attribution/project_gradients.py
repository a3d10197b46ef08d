"""Compute features: project the gradient of each parameter during the backward pass."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import scaled_integers
from trak_core.errors import InputError, listed
from trak_core.gradients import Batch, GradientMethod, explain_not_finite
from trak_core.gradients.gradient_terms import (
    Consumer,
    Contribution,
    Lookup,
    Outer,
    max_piece_entries,
    summed_parts,
)
from trak_core.gradients.margins_in_pieces import MarginFactors
from trak_core.gradients.model_inputs import naming_sample
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.projection import OuterProducts, add_projection, add_rows, prefers_factors
from trak_core.settings import ProjectionSpec, matrix_shape

# Rounding to a dtype may change a sample's features by at most this fraction of their norm. float16
# has a relative error of at most 5e-4, except for entries below 6e-5 or above 65504. int8 has an
# error of 1e-2 for entries of similar size, and more if one entry is far larger than the others.
_MOST_LOST = {"float16": 1e-3, "int8": 2e-2}

# Gradients with at most this many entries in total are copied into one tensor to project them
# together.
_JOINED = 2**18


class Features(Consumer):
    """A consumer that multiplies each sample's gradient x by the projection matrix R.

    A gradient method passes the gradients of each parameter, for all samples of a batch, to
    ``take``, and calls ``finish`` at the end. x consists of the flattened gradients of all
    parameters, in the order of the parameters. Small parts of x are collected and projected in one
    call. If a gradient is a sum of outer products of vectors, a tensor sketch is computed from
    these vectors where that is cheaper. ``scales`` are factors that multiply the entries of
    gradients, by parameter name. Gradients with scales are not computed from vectors.

    Attributes:
        rows: x R, shape (batch, proj_dim), float32, without the scale of the projection. The rows
            are complete after ``finish``.
        products: For a tensor sketch, the part of ``rows`` that is computed from vectors of outer
            products. None for other projections.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        projection: ProjectionSpec,
        n_samples: int,
        threads: int,
        scales: Mapping[str, Tensor] | None = None,
    ):
        self._projection, self._threads = projection, threads
        # For each parameter, its first coordinate in x and its index among non-empty parameters.
        self._numbers: dict[int, tuple[int, int]] = {}
        self._scale_of = {
            id(parameters[name]): scale.flatten() for name, scale in (scales or {}).items()
        }
        offset = 0
        for number, parameter in enumerate(p for p in parameters.values() if p.numel()):
            self._numbers[id(parameter)] = offset, number
            offset += parameter.numel()
        device = next(iter(parameters.values())).device
        self.begin([torch.zeros(n_samples, projection.proj_dim, device=device)])

    def begin(self, totals: Sequence[Tensor]) -> None:
        super().begin(totals)
        (self.rows,) = totals
        self.products = None
        if self._projection.kind.about.of_matrices:
            self.products = OuterProducts(self._projection, len(self.rows), self.rows.device)
        # The collected parts of x by first coordinate, and the total number of their entries.
        self._held: dict[int, Tensor] = {}
        self._n_held = 0

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        if not parameter.numel():
            return
        offset, number = self._numbers[id(parameter)]
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
            if self._n_held + part.numel() > max_piece_entries(part.device):
                self._project_held()
            self._held[offset + first] = part
            self._n_held += part.numel()

    def _sketched(
        self, products: OuterProducts, number: int, shape: tuple[int, int], use: Contribution
    ) -> bool:
        """Sketch a gradient's outer products if this is cheaper, and return whether it was done."""
        if isinstance(use, Lookup) and use.matrix == shape:
            products.add_lookups(number, use.indices, use.gradients[0])
            return True
        n_tokens, factors = factors_of(use, shape)
        sizes = use.n_rows, n_tokens, *shape, self._projection.proj_dim
        if not n_tokens or not prefers_factors(*sizes):
            return False
        for left, right in factors:
            products.add_products(number, left, right)
        return True

    def _project_held(self) -> None:
        """Project the collected parts, with one call for each run of consecutive coordinates."""
        held = sorted(self._held.items())
        self._held, self._n_held = {}, 0
        if self.products is not None and self.rows.device.type == "cuda":
            add_rows(self.rows, held, self._projection)
            return
        runs: list[tuple[int, list[Tensor]]] = []
        stop = -1
        for first, block in held:
            if first != stop or block.dtype != runs[-1][1][0].dtype:
                runs.append((first, []))
            runs[-1][1].append(block)
            stop = first + block.shape[1]
        for first, blocks in runs:
            if len(blocks) > 1 and sum(block.numel() for block in blocks) <= _JOINED:
                blocks = [torch.cat(blocks, dim=1)]
            add_projection(blocks, self._projection, first, self.rows, self._threads)

    def finish(self) -> None:
        self._project_held()
        if self.products is not None:
            self.rows += self.products.total()
        self.products = None

    def scaled(self) -> Tensor:
        """Return the features phi(x) = scale * x R, for which E<phi(x), phi(y)> = <x, y>."""
        return self.rows * self._projection.scale


def factors_of(
    use: Contribution, shape: tuple[int, int]
) -> tuple[int, Iterable[tuple[Tensor, Tensor]]]:
    """Return the number of tokens of a gradient, and the factors of its outer products.

    A sample's gradient is the sum over tokens of the outer products of two factors, which have
    shapes (batch, tokens, rows) and (batch, tokens, columns). If a gradient has no such form, the
    number is 0 and there are no factors.
    """
    if use.matrix == shape and isinstance(use, Outer):
        n_tokens, outers = use.inputs.shape[1], iter([use])
    elif use.matrix == shape and isinstance(use, MarginFactors):
        n_tokens, outers = use.n_tokens, use.outers()
    else:
        return 0, ()
    pairs = ((outer.inputs, outer.gradients[0], outer.is_transposed) for outer in outers)
    return n_tokens, ((b, a) if is_transposed else (a, b) for a, b, is_transposed in pairs)


@dataclass(frozen=True, slots=True)
class QueuedFeatures:
    """A batch's features on the CPU, and the labels, outputs and other values of its samples.

    A GPU may still be computing and copying these tensors until ``event``, which is None without a
    GPU. ``explain`` raises an error that names the samples whose gradients are not finite.
    """

    copies: list[Tensor]
    event: torch.cuda.Event | None
    explain: Callable[[], None]

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return them. Raise an error if features are not finite."""
        if self.event is not None:
            self.event.synchronize()
        rows, _, outputs, *_ = self.copies
        if not (np.isfinite(rows.numpy()).all() and outputs.isfinite().all()):
            self.explain()
            raise InputError(
                "Features must be finite. Found NaN or infinity although all gradients are finite, "
                "because sums of gradients overflow float32. Look for very large numbers in the "
                "samples and in the checkpoint.",
                code="projection.not_finite",
            )
        return self.copies


def _copied(tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Return copies of tensors on the CPU, and the GPU's event after which they are complete."""
    copies, event = [tensor.to("cpu", non_blocking=True) for tensor in tensors], None
    if tensors[0].is_cuda:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensors[0].device))
    return copies, event


def queued_features(
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
) -> QueuedFeatures:
    """Return a batch's features, shape (batch, proj_dim), float32, without waiting for a GPU.

    The features of a gradient x are x R, where R is the projection matrix. If ``is_scaled``, they
    are multiplied by the projection's scale. The result also contains, for each sample, the label
    as a number and the tensors of ``PerSample.columns``.
    """
    sums = Features(parameters, projection, len(batch), threads, scales)
    with naming_sample(model, batch, ids):
        columns = method(model, parameters, output, batch, sums)
    rows = sums.scaled() if is_scaled else sums.rows
    numbers = torch.vmap(output.label_number)(batch.labels)
    explain = partial(explain_not_finite, model, parameters, output, batch, ids)
    return QueuedFeatures(*_copied([rows, numbers, *columns]), explain)


def stored_rows(rows: np.ndarray, dtype: str, sample_ids: Sequence[object]) -> np.ndarray:
    """Return features rounded to a dtype. Raise an error if rounding changes them too much."""
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
    if lost.any():
        named = listed(sample_ids[i] for i in np.flatnonzero(lost).tolist())
        sizes = np.abs(rows[lost])
        raise InputError(
            f"Rounding to {dtype} must change a sample's features by at most {_MOST_LOST[dtype]} "
            f"of their norm. Rounding changes the features of samples {named} by up to "
            f"{(losses[lost] / norms[lost]).max():.2g}, because the sizes of their entries range "
            f"from {sizes[sizes > 0].min():.2g} to {sizes.max():.2g}. Set features_dtype to "
            "float32.",
            code="stages.features_dtype",
        )
    return stored


def compilers(device: torch.device) -> tuple[str, ...]:
    """Return the packages that compile the projection's kernels, for the provenance of files."""
    return ("numba", "numba-cuda") if device.type == "cuda" else ("numba",)
