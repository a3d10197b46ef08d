"""Score by the Gauss-Newton matrix of the training loss itself, without forming it."""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trak_core.attribution.batch_by_length import OrderedSamples, StoredSamples, subset
from trak_core.attribution.inner_products import columns_in_order
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.config.memory_needs import newton_targets
from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients import (
    Batch,
    Room,
    check_finite,
    check_finite_gramian,
    check_labels,
    formed_gradients,
    gradients_one_by_one,
    in_chunks,
    in_evaluation_mode,
    memory_by_length,
    n_params,
    refuse_hooks,
    refuse_not_finite,
)
from trak_core.model_outputs.model_output import over_samples
from trak_core.study.dataset_split import Split
from trak_core.system.progress import blocks_with_progress, log

# Steps of conjugate gradients, and the training samples that make the matrix: all, or a quarter if
# that is more (docs/explanation/choosing.md measures both).
STEPS, LEAST_CURVED, CURVED_SHARE = 12, 256, 4
# Random vectors that give the trace, and vectors that go through the model together.
_SIGNS, _TOGETHER = 16, 8


@dataclass(frozen=True, slots=True)
class NewtonScores:
    """Scores of one checkpoint, before loss weights.

    Attributes:
        values: A = J (G + ridge I)^-1 J_t^T, shape (n, m), float64.
        ridge: What was added to the diagonal of G.
        curved: How many training samples made G.
        train: Label numbers and ``PerSample.columns`` of the training samples.
        targets: The same of the targets.
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
    """Return A = J (G + ridge I)^-1 J_t^T, the solve by ``steps`` of conjugate gradients.

    J and J_t are the gradients of the model output, G = sum_i B_i^T H_i B_i the Gauss-Newton matrix
    of the training loss: B_i are derivatives of the logits by the parameters, H_i is the Hessian of
    the loss in the logits. ridge = damping tr(G) / n. G is summed over some training samples, the
    same for all targets, and scaled to all; its trace is estimated from random signs. With few
    steps the answer is smoother than the inverse. It is the same for any batch and memory, to
    rounding.

    Sources: Martens, "Deep learning via Hessian-free optimization", ICML 2010; Koh and Liang,
        "Understanding Black-box Predictions via Influence Functions", ICML 2017, section 3.
    """
    hessian = loaded.output.loss_hessian
    if hessian is None:
        raise InputError(
            "projection: gauss_newton needs a model output whose training loss has a known Hessian "
            "in the logits. Found one without. Take `exact`, or a projection.",
            code="model.no_loss_hessian",
        )
    n, m = len(train.ids), len(targets.ids)
    block, held_bytes = newton_targets(n_params(loaded.parameters), n, m, memory_mb)
    chosen = np.random.default_rng(0).permutation(n)[: max(LEAST_CURVED, n // CURVED_SHARE)]
    splits = [targets, train, subset(train, np.sort(chosen).tolist())]
    stored = [_Stored(samples, loaded.stored(samples)) for samples in loaded.ordered(*splits)]
    left_mb = memory_mb - (held_bytes + sum(each.kept.n_bytes for each in stored)) // 2**20
    room = _room(loaded, stored, left_mb)
    for each in stored:
        each.at_once = each.samples.batches_of(batch_size, room)
    own, rows, curved = stored
    columns = [columns_in_order(loaded, e.samples, e.kept, e.at_once) for e in (own, rows)]
    for split, column in zip((targets, train), columns, strict=True):
        bad = (~column[1].isfinite()).nonzero().flatten().tolist()
        if bad:
            refuse_not_finite([split.ids[i] for i in bad], "Model outputs")
    values = np.empty((n, m))
    with _differentiating_forward(loaded.model):
        tangents = _Tangents(loaded)

        def matrix(vectors: Tensor) -> Tensor:
            """Return G times each of the vectors, shape (m, p)."""
            total = torch.zeros_like(vectors)
            for *_, part in curved.blocks(lambda batch: tangents.product(batch, vectors)):
                total += part
            return total * (n / len(curved.kept))

        ridge = damping * _trace(matrix, tangents) / n
        log(f"{len(curved.kept)} of {n} training samples make the matrix")
        for start, stop in blocks_with_progress(m, block, "targets"):
            solved = _solved(matrix, _gradients(loaded, own.kept, start, stop), ridge, steps)
            places = own.kept.places[start:stop]
            for first, last, part in rows.blocks(partial(tangents.of_values, vectors=solved)):
                of_rows = part.double().cpu().numpy().T
                values[np.ix_(rows.kept.places[first:last], places)] = of_rows
    check_finite_gramian(values, train.ids, targets.ids)
    return NewtonScores(values, ridge, len(curved.kept), columns[1], columns[0])


@dataclass(slots=True)
class _Stored:
    """Samples in the order in which they are taken, and in memory; how many are taken at once."""

    samples: OrderedSamples
    kept: StoredSamples
    at_once: Callable[[int], int] = lambda _: 1

    def blocks(self, compute: Callable[[Batch], Tensor]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield start, stop and what is computed of each batch."""
        rows = self.kept.rows
        return in_chunks(lambda i, j: compute(rows(slice(i, j))), len(self.kept), self.at_once)


def _room(loaded: LoadedModel, stored: Sequence["_Stored"], left_mb: int) -> Room:
    """Check all labels, and return how many samples fit with derivatives along some vectors."""
    needs = []
    for each in stored[:2]:
        few, n_classes = loaded.few(each.samples)
        for part, sample_id in zip(each.kept.parts, each.kept.ids, strict=True):
            check_labels(part.labels, loaded.output, n_classes, [sample_id])
        # Without blocks that run twice, which forward mode can't differentiate.
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
    """Run in evaluation mode with attention that forward mode takes; explain what it doesn't."""
    try:
        with (
            torch.no_grad(),
            in_evaluation_mode(model),
            sdpa_kernel(SDPBackend.MATH),
            warnings.catch_warnings(),
        ):
            # torch scripts some derivatives when forward mode first runs, which it says is old.
            warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            yield
    except RuntimeError as error:  # also what forward mode has no rule for
        if isinstance(error, InputError) or is_out_of_memory(error):
            raise
        raise InputError(
            "projection: gauss_newton needs a model that torch.func.jvp and vmap differentiate. "
            f"Found {type(error).__name__}: {(str(error).splitlines() or [''])[0]} Take `exact`, "
            "or a projection.",
            code="model.forward_mode",
        ) from error


class _Called(nn.Module):
    """A model as a module that takes batches."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> object:
        return batch.given_to(self.model)


class _Tangents:
    """Derivatives of a model along vectors of all parameters, shape (p,), in their order."""

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
        """P."""
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
        """Return the sum over a batch of B^T H B times each of the vectors, shape (m, p)."""

        def outputs(theta: dict[str, Tensor]) -> Tensor:
            return self._read(theta, batch)

        read, back = torch.func.vjp(outputs, self._theta)[:2]
        hessian = self._output.loss_hessian
        assert hessian is not None

        def times(vector: Tensor) -> Tensor:
            moved = torch.func.jvp(outputs, (self._theta,), (self._named(vector),))[1]
            bent = torch.vmap(hessian)(read, batch.labels, moved)
            (products,) = back(bent.to(read.dtype))
            return torch.cat([products[name].flatten().float() for name in self._theta])

        return torch.vmap(times, chunk_size=_TOGETHER)(vectors)


def _trace(matrix: Callable[[Tensor], Tensor], tangents: _Tangents) -> float:
    """Return the trace of G, estimated without bias from random signs."""
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(_SIGNS // _TOGETHER):
        signs = torch.randint(2, (_TOGETHER, tangents.n_params), generator=generator)
        signs = (2 * signs - 1).to(tangents.device, torch.float32)
        total += float((signs * matrix(signs)).sum(dtype=torch.float64))
    return total / _SIGNS


def _gradients(loaded: LoadedModel, samples: StoredSamples, start: int, stop: int) -> Tensor:
    """Return whole gradients of f of some samples, shape (m, p)."""
    rows = []
    for part, sample_id in zip(samples.parts[start:stop], samples.ids[start:stop], strict=True):
        formed = formed_gradients(
            gradients_one_by_one, loaded.model, loaded.parameters, loaded.output, part
        )
        check_finite(formed, [sample_id])
        rows.append(torch.cat(formed.blocks(), dim=1))
    return torch.cat(rows)


def _solved(
    matrix: Callable[[Tensor], Tensor], gradients: Tensor, ridge: float, steps: int
) -> Tensor:
    """Return (G + ridge I)^-1 times each gradient (m, p), by conjugate gradients from 0."""
    solved, left, along = torch.zeros_like(gradients), gradients.clone(), gradients.clone()
    squares = _dot(left, left)
    seen: list[Tensor] = []
    for _ in range(steps):
        seen.append(left * _ratio(torch.ones_like(squares), squares.sqrt()))
        product = matrix(along) + ridge * along
        # Where nothing is left, nothing moves.
        share = _ratio(squares, _dot(along, product))
        solved += share * along
        left = left - share * product
        for direction in (*seen, *seen):  # against rounding, which conjugate gradients amplify
            left -= _dot(direction, left).float() * direction
        before, squares = squares, _dot(left, left)
        along = left + _ratio(squares, before) * along
    return solved


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True, dtype=torch.float64)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where that is 0, in float32."""
    return torch.where(b == 0, 0, a / b.where(b != 0, 1)).float()
