"""Compute inner products of samples' gradients for one checkpoint, one block at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trak_core.artifacts import GRAMIAN, create, software
from trak_core.attribution.batch_by_length import OrderedSamples
from trak_core.attribution.device import Compute, device_name
from trak_core.attribution.label_draws import LabelDraws
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import write_columns
from trak_core.config.memory_needs import gramian_need
from trak_core.errors import InputError, listed
from trak_core.gradients import GradientMethod, MemoryBudget, Variety, in_chunks, n_params
from trak_core.gradients.gradient_consumers import Formed
from trak_core.gradients.model_inputs import naming_sample
from trak_core.runtime.progress import log, with_progress
from trak_core.settings import FeaturesSpec, stream_of
from trak_core.study.dataset_split import Split

# Products are computed for _ROWS rows at a time. A sum in float32 has at most _ENTRIES terms,
# because longer sums would be less accurate.
_ENTRIES, _ROWS = 2**15, 256


def write_gramian(
    path: Path,
    loaded: LoadedModel,
    data: Split,
    spec: FeaturesSpec,
    compute: Compute,
    *,
    targets: Split | None = None,
    code: str,
) -> None:
    """Write the inner products of the gradients of training samples and ``targets``.

    Without targets, write the inner products of training samples' gradients with each other.
    """
    own, where = targets or data, device_name(loaded.device)
    n, m = len(data.ids), len(own.ids)
    log(f"{spec.split}: inner products of {n} x {m} gradients on {where}")
    values, columns = inner_products(loaded, data, targets, spec, compute)
    variety = Variety()
    variety.add(values[:n, :m].T)
    variety.check("targets" if targets else "training samples", must_differ=targets is None)
    file_spec = loaded.file_spec(spec, spec.projection)
    with create(path, GRAMIAN, file_spec, software(code, where, "torch", "numpy")) as writer:
        writer.matrix("gramian", data.ids, own.ids, dtype=np.float64)[:] = values[:n, :m]
        if spec.label_draws:
            names = range(len(values) - n), range(values.shape[1])
            writer.matrix("drawn", *names, dtype=np.float64)[:] = values[n:]
        write_columns(writer, own.ids, columns, spec)


def inner_products(
    loaded: LoadedModel, data: Split, targets: Split | None, spec: FeaturesSpec, compute: Compute
) -> tuple[np.ndarray, list[Tensor]]:
    """Return inner products of gradients, float64: R R^T or, with targets, R J_t^T.

    The first n rows of R are the training samples' gradients of the model output. With S
    ``label_draws``, n rows follow for each draw, which are the gradients for the drawn labels (see
    ``LabelDraws``). The rows of J_t are the targets' gradients. Partial sums in float32 are added
    in float64.

    The right factor of the product, R or J_t, is divided into blocks of rows that take at most
    three quarters of the memory. Each block is multiplied by batches of rows of R. Therefore the
    gradients of training samples are computed once for each block.

    The second returned value contains the labels, outputs, predictions, loss weights and any
    curvatures of the targets or, without targets, of the training samples.
    """
    n_rows = 1 + spec.label_draws
    others, n_other_rows = (data, n_rows) if targets is None else (targets, 1)
    need = gramian_need(len(data.ids) * n_rows, len(others.ids) * n_other_rows)
    need.check(compute.memory_mb)
    draws = None
    if spec.label_draws:
        draws = LabelDraws(spec.label_draws, stream_of(spec.checkpoint or ""))
    splits = [data] if targets is None else [targets, data]
    ordered = loaded.ordered(*splits)
    left_mb = max(0, compute.memory_mb - need.fixed_bytes // 2**20)
    given, room = _prepared(loaded, ordered, draws, left_mb)
    train = _Rows(loaded, *given, ordered[-1], draws)
    right = train if targets is None else _Rows(loaded, *given, ordered[0], None)
    # The memory for one sample includes its rows in the block. They are added back here, because
    # the memory for the block is subtracted below.
    spare = room.budget_bytes - room.needed.of_longest.bytes_of(1) + right.bytes_per_sample
    most = min(3 * room.budget_bytes // 4, spare) // right.bytes_per_sample
    block = max(1, min(len(others.ids), most))
    room = replace(room, budget_bytes=room.budget_bytes - block * right.bytes_per_sample)
    log(f"gradients of {block} {'training samples' if targets is None else 'targets'} in memory")
    values = np.empty((len(data.ids) * n_rows, len(others.ids) * n_other_rows))
    columns = _fill(values, train, right, block, compute.batch_size, room)
    check_finite(values, data.ids * n_rows, others.ids * n_other_rows, columns[1])
    return values, columns


def check_finite(
    products: np.ndarray, row_ids: Sequence[object], ids: Sequence[object], outputs: Tensor
) -> None:
    """Raise an error if an inner product of gradients or a model output is NaN or infinite.

    ``products`` has shape (n, m). ``row_ids`` and ``ids`` contain the id of the sample to which
    each row and each column belongs. ``outputs``, shape (o,), are the model outputs of the first o
    samples in ``ids``.
    """
    bad = ~np.isfinite(products)
    rows, columns = (np.flatnonzero(bad.all(axis=axis)).tolist() for axis in (1, 0))
    columns += (~outputs.isfinite()).nonzero().flatten().tolist()
    # A gradient that isn't finite spoils a whole row or column. Otherwise, gradients are finite,
    # but some inner products overflow.
    if not (rows or columns):
        rows = np.flatnonzero(bad.any(axis=1)).tolist()
    bad_ids = [row_ids[i] for i in rows] + [ids[i] for i in columns]
    if bad_ids:
        raise InputError(
            "Model outputs and inner products of gradients must be finite. Found NaN or infinity "
            f"for the samples {listed(dict.fromkeys(map(str, bad_ids)))}. Look for NaN, infinity "
            "and very large numbers in these samples and in the checkpoint.",
            code="gradients.values_not_finite",
        )


def _prepared(
    loaded: LoadedModel, ordered: list[OrderedSamples], draws: LabelDraws | None, left_mb: int
) -> tuple[tuple[GradientMethod, int | None], MemoryBudget]:
    """Return the gradient method, the number of classes, and the memory budget for batches."""
    fews, n_classes = zip(*(loaded.few(samples) for samples in ordered), strict=True)
    needs = [loaded.memory(few, left_mb) for few in fews]
    largest = max(
        range(len(needs)), key=lambda i: (needs[i].longest, needs[i].of_longest.bytes_of(1))
    )
    # A sample also needs memory for its gradients in the batch and in the block, and for one copy.
    more = (3 + 2 * (draws.n_draws if draws else 0)) * _row_bytes(loaded)
    more += draws.bytes_of_sample(loaded, fews[largest]) if draws else 0
    needed = needs[largest].mapped(
        lambda memory: replace(memory, activation_bytes=memory.activation_bytes + more)
    )
    with ordered[largest].naming_longest():
        room = needed.room(loaded.device, left_mb)
    for few in fews:
        loaded.check_apart(few, room.most(needed.longest))
    return (loaded.method_of(loaded, fews[-1]), n_classes[-1]), room


def _dtype(loaded: LoadedModel) -> torch.dtype:
    """Return the dtype of stored gradients: float64 if a parameter is float64, else float32."""
    dtypes = (p.dtype for p in loaded.parameters.values())
    return reduce(torch.promote_types, dtypes, torch.float32)


def _row_bytes(loaded: LoadedModel) -> int:
    return n_params(loaded.parameters) * _dtype(loaded).itemsize


@dataclass(frozen=True, slots=True)
class _Rows:
    """A matrix whose rows are gradients of samples, for their given labels and for drawn labels."""

    loaded: LoadedModel
    method: GradientMethod
    n_classes: int | None
    samples: OrderedSamples
    draws: LabelDraws | None

    @property
    def rows_per_sample(self) -> int:
        """The number of rows of each sample: one for the given label, and one for each draw."""
        return 1 + (self.draws.n_draws if self.draws else 0)

    @property
    def bytes_per_sample(self) -> int:
        return self.rows_per_sample * _row_bytes(self.loaded)

    def zeros(self, n_samples: int) -> Tensor:
        shape = self.rows_per_sample * n_samples, n_params(self.loaded.parameters)
        return torch.zeros(shape, dtype=_dtype(self.loaded), device=self.loaded.device)

    def chunks(
        self, start: int, stop: int, at_once: Callable[[int], int], into: Tensor | None = None
    ) -> Iterator[tuple[int, np.ndarray, Tensor, list[Tensor]]]:
        """Yield the gradients of samples ``start`` to ``stop``, one batch at a time.

        Batches may be in another order than the data. For each batch, yield the number of samples;
        the rows of their gradients in a matrix in the order of the data; the gradients; and a list
        of the samples' labels, model outputs and other values. ``at_once`` maps the first sample of
        a batch to the batch size. If ``into`` is given, the rows are written into this tensor.
        """
        width = self.rows_per_sample

        def compute(i: int, j: int) -> tuple[Tensor, list[Tensor]]:
            rows = self.zeros(j - i) if into is None else into[i * width : j * width].zero_()
            return rows, self._differentiate(rows, start + i, start + j)

        chunks = in_chunks(compute, stop - start, lambda i: at_once(start + i))
        firsts = len(self.samples) * np.arange(width)[:, None]
        for i, j, (rows, columns) in chunks:
            numbers = firsts + self.samples.rows[start + i : start + j]
            yield j - i, numbers.ravel(), rows, columns

    def _differentiate(self, rows: Tensor, start: int, stop: int) -> list[Tensor]:
        """Add samples' gradients to ``rows``. Return their labels, outputs and other values."""
        loaded, parts = self.loaded, rows.split(stop - start)
        batch = loaded.checked(self.samples, start, stop, self.n_classes)
        ids = self.samples.split.ids[start:stop]
        drawn = self.draws.drawn(loaded, batch, ids) if self.draws else ()
        columns: list[Tensor] = []
        labelled = chain([(loaded.output, batch)], drawn)
        for part, (output, own) in zip(parts, labelled, strict=True):
            consumer = Formed.adding_to(part, loaded.parameters)
            with naming_sample(loaded.model, own, ids):
                computed = self.method(loaded.model, loaded.parameters, output, own, consumer)
            columns = columns or computed
        return [torch.vmap(loaded.output.label_number)(batch.labels), *columns]


def _fill(
    values: np.ndarray, train: _Rows, right: _Rows, block: int, batch_size: int, room: MemoryBudget
) -> list[Tensor]:
    """Write the inner products of the rows of ``train`` with the rows of ``right`` to ``values``.

    The gradients of ``block`` samples in ``right`` are in memory at a time. ``room`` is the memory
    budget for batches.

    Returns:
        The labels, outputs and other values of the samples in ``right``.
    """
    is_square = train is right
    n, m = len(train.samples), len(right.samples)
    at_once, right_at_once = (rows.samples.batches_of(batch_size, room) for rows in (train, right))
    kept: list[list[Tensor]] = []

    def put(rows: np.ndarray, columns: np.ndarray, products: np.ndarray) -> None:
        values[np.ix_(rows, columns)] = products
        if is_square:
            values[np.ix_(columns, rows)] = products.T

    def steps() -> Iterator[int]:
        """Compute all products. For each batch of gradients, yield the number of samples."""
        held = right.zeros(block)
        for start in range(0, m, block):
            stop = min(start + block, m)
            numbers: list[np.ndarray] = []
            for count, own, _, columns in right.chunks(start, stop, right_at_once, held):
                numbers.append(own)
                kept.append([column.cpu() for column in columns])
                if is_square:
                    yield count
            rows, own = held[: (stop - start) * right.rows_per_sample], np.concatenate(numbers)
            for i in range(0, len(rows) if is_square else 0, _ROWS):
                products = _products(rows[i : i + _ROWS], rows[: i + _ROWS])
                corner = np.tril(products[:, i:])
                products[:, i:] = corner + np.tril(corner, -1).T
                put(own[i : i + _ROWS], own[: i + _ROWS], products)
            for count, others, part, _ in train.chunks(stop if is_square else 0, n, at_once):
                put(others, own, _products(part, rows))
                yield count

    starts = range(0, m, block)
    total = sum(n - start for start in starts) if is_square else n * len(starts)
    # The gradients of a sample are computed several times, but the progress bar counts n samples.
    done = (-(-n * count // total) for count in accumulate(steps(), initial=0))
    for _ in with_progress(pairwise(done), n, "training samples"):
        pass
    back = torch.from_numpy(np.argsort(right.samples.rows))
    return [torch.cat(parts)[back] for parts in zip(*kept, strict=True)]


def _products(a: Tensor, b: Tensor) -> np.ndarray:
    """Return a b^T, float64. Long sums are float64 sums of partial sums in float32."""
    if a.shape[1] <= _ENTRIES:  # With few columns, float64 is cheap enough for the whole sum.
        left = a.double()
        return np.hstack([(left @ part.double().T).cpu().numpy() for part in b.split(_ROWS)])
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y in zip(a.split(_ENTRIES, dim=1), b.split(_ENTRIES, dim=1), strict=True):
        total += x @ y.T
    return total.cpu().numpy()
