"""Score with the Gauss-Newton matrix of the training loss, which is never formed."""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trak_core.attribution.batch_by_length import StoredSamples, subset
from trak_core.attribution.inner_products import columns_in_order
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.config.memory_needs import newton_targets
from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients import (
    Batch,
    MemoryBudget,
    check_finite,
    check_finite_gramian,
    formed_gradients,
    gradients_one_by_one,
    in_chunks,
    in_evaluation_mode,
    memory_by_length,
    n_params,
    refuse_hooks,
)
from trak_core.model_outputs.model_output import over_samples
from trak_core.runtime.progress import blocks_with_progress, log
from trak_core.study.dataset_split import Split

# The number of steps of conjugate gradients. G is summed over n / CURVED_SHARE training samples,
# but at least LEAST_CURVED (docs/explanation/choosing.md has measurements of both).
STEPS, LEAST_CURVED, CURVED_SHARE = 12, 256, 4
# The number of random vectors for the trace, and the number of vectors in one model call.
_SIGNS, _TOGETHER = 16, 8


@dataclass(frozen=True, slots=True)
class NewtonScores:
    """Scores of one checkpoint, before loss weights.

    Attributes:
        values: A = J (G + ridge I)^-1 J_t^T, shape (n, m), float64.
        ridge: The number that was added to the diagonal of G.
        curved: Number of training samples over which G was summed.
        train: Label numbers and ``PerSample.columns`` of the training samples.
        targets: The same for the targets.
    """

    values: np.ndarray
    ridge: float
    curved: int
    train: list[Tensor]
    targets: list[Tensor]


def newton_scores(
    loaded: LoadedModel,
    train: Split,
    targets: Split,
    damping: float,
    batch_size: int,
    memory_mb: int,
    steps: int = STEPS,
) -> NewtonScores:
    """Return A = J (G + ridge I)^-1 J_t^T, solved by ``steps`` of conjugate gradients from 0.

    J and J_t are the gradients of the model output. G = sum_i B_i^T H_i B_i, where B_i is the
    derivative of sample i's logits with respect to the parameters and H_i the Hessian of its loss
    with respect to the logits. ridge = damping tr(G) / n. Few steps act like a larger damping.

    This differs from the definition in: 1. G is summed over a random part of the training samples,
    the same for all targets, and multiplied by n over their number. 2. tr(G) is the mean of s^T G s
    over random sign vectors s (Hutchinson). Batch size and memory change scores by rounding only.

    Sources: Martens, "Deep learning via Hessian-free optimization", ICML 2010; Koh and Liang,
        "Understanding Black-box Predictions via Influence Functions", ICML 2017, section 3.
    """
    hessian = loaded.output.loss_hessian
    if hessian is None:
        raise InputError(
            "projection: gauss_newton needs the Hessian of the training loss in the logits, which "
            "this model output does not have. Use `exact` or a random projection.",
            code="model.no_loss_hessian",
        )
    n, m = len(train.ids), len(targets.ids)
    block, held_bytes = newton_targets(n_params(loaded.parameters), n, m, memory_mb)
    chosen = np.random.default_rng(0).permutation(n)[: max(LEAST_CURVED, n // CURVED_SHARE)]
    splits = [targets, train, subset(train, np.sort(chosen).tolist())]
    stored = [loaded.stored(samples) for samples in loaded.ordered(*splits)]
    left_mb = memory_mb - (held_bytes + sum(samples.n_bytes for samples in stored)) // 2**20
    room = _room(loaded, stored[:2], left_mb)
    of_targets, of_train, curved = stored

    def batches(
        samples: StoredSamples, compute: Callable[[Batch], Tensor]
    ) -> Iterator[tuple[int, int, Tensor]]:
        at_once = samples.samples.batches_of(batch_size, room)
        return in_chunks(lambda i, j: compute(samples.rows(i, j)), len(samples), at_once)

    given = batch_size, room
    target_columns = columns_in_order(loaded, of_targets, targets.ids, *given)
    train_columns = columns_in_order(loaded, of_train, train.ids, *given)
    values = np.empty((n, m))
    with _differentiating_forward(loaded.model):
        tangents = _Tangents(loaded)

        def matrix(vectors: Tensor) -> Tensor:
            """Return G times each of the vectors, shape (m, p)."""
            total = torch.zeros_like(vectors)
            for *_, part in batches(curved, lambda batch: tangents.product(batch, vectors)):
                total += part
            return total * (n / len(curved))

        ridge = damping * _trace(matrix, tangents) / n
        log(f"{len(curved)} of {n} training samples make the matrix")
        for start, stop in blocks_with_progress(m, block, "targets"):
            solved = _solved(matrix, _gradients(loaded, of_targets, start, stop), ridge, steps)
            columns = of_targets.samples.rows[start:stop]
            for first, last, part in batches(of_train, partial(tangents.of_values, vectors=solved)):
                rows = of_train.samples.rows[first:last]
                values[np.ix_(rows, columns)] = part.double().cpu().numpy().T
    check_finite_gramian(values, train.ids, targets.ids)
    return NewtonScores(values, ridge, len(curved), train_columns, target_columns)


def _room(loaded: LoadedModel, stored: Sequence[StoredSamples], left_mb: int) -> MemoryBudget:
    """Check all labels, and return the memory budget for derivatives of batches along vectors."""
    needs = []
    for samples in stored:
        few = loaded.few_checked(samples)
        # Blocks are not recomputed here, because forward mode cannot differentiate recomputation.
        needs.append(memory_by_length(loaded.model, loaded.parameters, loaded.output, few))
        loaded.check_apart(few, len(few))
    needed = max(needs, key=lambda need: (need.longest, need.of_longest.of(1)))
    needed = needed.mapped(
        lambda memory: replace(
            memory,
            activation_bytes=(1 + _TOGETHER) * memory.activation_bytes,
            gradient_bytes=0,
            shared_bytes=3 * _TOGETHER * memory.gradient_bytes,
        )
    )
    return needed.room(loaded.device, max(0, left_mb))


@contextmanager
def _differentiating_forward(model: nn.Module) -> Generator[None, None, None]:
    """Use attention kernels with forward-mode derivatives; explain errors of other operations."""
    try:
        with (
            torch.no_grad(),
            in_evaluation_mode(model),
            sdpa_kernel(SDPBackend.MATH),
            warnings.catch_warnings(),
        ):
            # The first use of forward mode calls torch.jit.script, which torch warns about.
            warnings.filterwarnings("ignore", ".*torch.jit.script")
            yield
    except RuntimeError as error:  # includes NotImplementedError of missing derivatives
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise
        raise InputError(
            "projection: gauss_newton needs a model that torch.func.jvp and vmap differentiate. "
            f"Found {type(error).__name__}: {(str(error).splitlines() or [''])[0]} Use `exact` or "
            "a random projection.",
            code="model.forward_mode",
        ) from error


class _Called(nn.Module):
    """A module that calls a model on a batch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> object:
        return batch.given_to(self.model)


class _Tangents:
    """Derivatives of a model along vectors of shape (p,), which concatenate its parameters."""

    def __init__(self, loaded: LoadedModel):
        refuse_hooks(
            *(loaded.model, loaded.parameters, "projection: gauss_newton"),
            "Take `exact`, or a projection",
        )
        self._called, self._output = _Called(loaded.model), loaded.output
        self._theta = {f"model.{n}": p.detach() for n, p in loaded.parameters.items()}
        self._sizes = [p.numel() for p in self._theta.values()]
        self.device = loaded.device

    @property
    def n_params(self) -> int:
        """The number p of parameter entries."""
        return sum(self._sizes)

    def _named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = zip(self._theta.items(), vector.split(self._sizes), strict=True)
        return {name: part.view(p.shape).to(p.dtype) for (name, p), part in parts}

    def _read(self, theta: dict[str, Tensor], batch: Batch) -> Tensor:
        return self._output.read(torch.func.functional_call(self._called, theta, (batch,)))

    def of_values(self, batch: Batch, vectors: Tensor) -> Tensor:
        """Return derivatives of f along vectors (m, p), shape (m, batch)."""

        def values(theta: dict[str, Tensor]) -> Tensor:
            return over_samples(self._output.value, self._read(theta, batch), batch.labels)

        def along(vector: Tensor) -> Tensor:
            return torch.func.jvp(values, (self._theta,), (self._named(vector),))[1]

        return torch.vmap(along, chunk_size=_TOGETHER)(vectors)

    def product(self, batch: Batch, vectors: Tensor) -> Tensor:
        """Return sum_i B_i^T H_i B_i v over a batch for each vector v, shape (m, p)."""

        def outputs(theta: dict[str, Tensor]) -> Tensor:
            return self._read(theta, batch)

        read, back = torch.func.vjp(outputs, self._theta)[:2]
        hessian = self._output.loss_hessian
        assert hessian is not None

        def times(vector: Tensor) -> Tensor:
            # jvp computes B v, and back computes B^T (H B v). No matrix is formed.
            b_v = torch.func.jvp(outputs, (self._theta,), (self._named(vector),))[1]
            h_b_v = torch.vmap(hessian)(read, batch.labels, b_v)
            (products,) = back(h_b_v.to(read.dtype))
            return torch.cat([products[name].flatten().float() for name in self._theta])

        return torch.vmap(times, chunk_size=_TOGETHER)(vectors)


def _trace(matrix: Callable[[Tensor], Tensor], tangents: _Tangents) -> float:
    """Return the mean of s^T G s over random sign vectors s, an unbiased estimate of tr(G)."""
    # E[s s^T] = I, so that E[s^T G s] = tr(G E[s s^T]) = tr(G).
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(_SIGNS // _TOGETHER):
        signs = torch.randint(2, (_TOGETHER, tangents.n_params), generator=generator)
        signs = (2 * signs - 1).to(tangents.device, torch.float32)
        total += float((signs * matrix(signs)).sum(dtype=torch.float64))
    return total / _SIGNS


def _gradients(loaded: LoadedModel, samples: StoredSamples, start: int, stop: int) -> Tensor:
    """Return the gradients of f for the samples from ``start`` to ``stop``, shape (m, p)."""
    rows = []
    ids = samples.samples.split.ids[start:stop]
    for part, sample_id in zip(samples.parts[start:stop], ids, strict=True):
        formed = formed_gradients(
            gradients_one_by_one, loaded.model, loaded.parameters, loaded.output, part
        )
        check_finite(formed, [sample_id])
        rows.append(torch.cat(formed.blocks(), dim=1))
    return torch.cat(rows)


def _solved(
    matrix: Callable[[Tensor], Tensor], gradients: Tensor, ridge: float, steps: int
) -> Tensor:
    """Return (G + ridge I)^-1 g for each gradient g, shape (m, p), by conjugate gradients from 0.

    This differs from the textbook's conjugate gradients in: each residual is made orthogonal to
    all earlier ones, twice, because rounding errors would otherwise grow.
    """
    # With M = G + ridge I, residual r = g - M x and direction d: x += d |r|^2 / (d^T M d), then
    # d = r + d |r|^2 / |r_before|^2.
    solution, residual = torch.zeros_like(gradients), gradients.clone()
    direction, squares = gradients.clone(), _dot(gradients, gradients)
    earlier: list[Tensor] = []
    for _ in range(steps):
        earlier.append(residual * _ratio(torch.ones_like(squares), squares.sqrt()))
        product = matrix(direction) + ridge * direction
        # `_ratio` returns a step of 0 if the residual is 0.
        step = _ratio(squares, _dot(direction, product))
        solution += step * direction
        residual = residual - step * product
        for unit in (*earlier, *earlier):
            residual -= _dot(unit, residual).float() * unit
        before, squares = squares, _dot(residual, residual)
        direction = residual + _ratio(squares, before) * direction
    return solution


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True, dtype=torch.float64)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b in float32, with 0 where b is 0."""
    return torch.where(b == 0, 0, a / b.where(b != 0, 1)).float()
