"""Read samples of a data set, select samples by their ids, and replace labels."""

import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from trak_core.data.row_files import FromRow
from trak_core.errors import (
    InputError,
    StoppedError,
    caused_by_out_of_memory,
    disk_full_reason,
    first_line,
    listed,
)

_MAX_ID_BYTES = 255
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
class Split:
    """Samples and their ids. Either all ids are integers, or all are strings.

    ``samples`` is an object with ``len()`` and ``[i]``, such as a torch Dataset. A sample is a
    tuple whose last entry is the label, or a dict that contains the label under the key `labels`.
    """

    samples: Any
    ids: list[int] | list[str]

    def take(self, ids: Sequence[int | str]) -> "Split":
        """Return the samples with the given ids, in the given order. The ids must be distinct."""
        position = {sample_id: i for i, sample_id in enumerate(self.ids)}
        counts = Counter(ids)
        # A bool is refused. Otherwise, True would select the sample with the id 1, as True == 1.
        wrong = [i for i in ids if i not in position or isinstance(i, bool) or counts[i] > 1]
        if wrong:
            raise InputError(
                "Targets must be ids of samples in the study's target_data() or in the "
                f"experiment's `data`. Each must be listed only once. Found {listed(wrong)}. The "
                f"data contain {len(position)} samples, whose ids are for example {self.ids[0]!r} "
                f"and {self.ids[-1]!r}.",
                code="study.no_target",
            )
        return self.select([position[i] for i in ids])

    def select(self, rows: Sequence[int]) -> "Split":
        """Return the samples with the indices ``rows``, in the order of ``rows``."""
        ids: Any = [self.ids[row] for row in rows]
        return Split(Subset(self.samples, rows), ids)

    def sample(self, row: int) -> Any:
        """Return sample number ``row``. If the user's data set fails, raise an ``InputError``."""
        with users_code(f"reading sample {self.ids[row]}"):
            return self.samples[row]

    def batch(self, start: int, stop: int) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Stack samples ``start`` to ``stop - 1`` into tensors.

        Returns:
            A tuple of tensors if samples are tuples, or a dict of tensors if samples are dicts. The
            first dimension of each tensor has the size ``stop - start``.
        """
        samples = [self.sample(row) for row in range(start, stop)]
        parts = [_entries(sample) for sample in samples]
        for sample_id, part in zip(self.ids[start:stop], parts, strict=True):
            if part.keys() != parts[0].keys():
                first, other = (", ".join(entries) or "nothing" for entries in (parts[0], part))
                raise InputError(
                    "Samples must be tuples of equal length, or dicts with the same keys. Found "
                    f"{first} in sample {self.ids[start]}, and {other} in sample {sample_id}.",
                    code="study.sample_entries",
                )
        stacked = {key: _stacked([part[key] for part in parts], key) for key in parts[0]}
        return stacked if isinstance(samples[0], Mapping) else tuple(stacked.values())


def _entries(sample: Any) -> dict[str, Any]:
    """Return a sample as a dict. Entries of a tuple get the keys "entry 0", "entry 1", ..."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, list | tuple):
        return {f"entry {i}": entry for i, entry in enumerate(sample)}
    raise InputError(
        f"A sample must be a tuple or a dict. Found {type(sample).__name__}. Pass tensors with a "
        "row for each sample as a tuple `(inputs, labels)`. A list must contain samples.",
        code="study.sample_type",
    )


def _stacked(parts: Sequence[Any], name: str) -> Tensor:
    """Return a tensor that stacks the values of one entry from several samples.

    The values are tensors, arrays, numbers or lists of numbers. Messages call the entry ``name``.
    """
    try:
        # default_collate would transpose lists, so they are converted to tensors first. It would
        # also convert tensors of different dtypes to one dtype, so different dtypes are an error.
        tensors = [as_tensor(p) if isinstance(p, list | np.ndarray) else p for p in parts]
        dtypes = {str(p.dtype) for p in tensors if isinstance(p, Tensor)}
        if len(dtypes) > 1:
            raise TypeError(f"the dtypes differ: {', '.join(sorted(dtypes))}")
        stacked = default_collate(tensors)
        if not isinstance(stacked, Tensor):
            raise TypeError("these values are not numbers")
        # torch supports few operations on unsigned integers with more than 8 bits.
        return stacked.long() if stacked.dtype in _UNSIGNED else stacked
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = {str(tuple(p.shape)) if hasattr(p, "shape") else type(p).__name__ for p in parts}
        raise InputError(
            "Samples must be tuples or dicts of tensors or numbers, with the same shapes in every "
            "sample. Texts must be padded to one length. Found "
            f"{', '.join(sorted(shapes)[:4])} for {name}: {first_line(error)}",
            code="study.sample_shapes",
        ) from error


def as_tensor(values: Any) -> Tensor:
    """Return a list or an array as a tensor.

    ``torch.as_tensor`` refuses arrays with negative strides, such as reversed arrays, and arrays in
    another byte order. Such arrays are copied first.
    """
    if np.ma.is_masked(values):
        raise TypeError("some values are masked")
    if isinstance(values, np.ndarray):
        order = "C" if min(values.strides, default=0) < 0 else "K"
        values = np.asarray(values, values.dtype.newbyteorder("="), order)
    return torch.as_tensor(values)


@contextmanager
def users_code(call: str) -> Generator[None, None, None]:
    """Convert exceptions and ``SystemExit`` from the user's code to an ``InputError``.

    The user's code is called within the ``with`` block. The message consists of ``call`` (a
    description of the call), the original message and the traceback. An exception is not converted
    if a full disk, exhausted memory or a stop signal caused it, as the user's code is not at fault.
    """
    try:
        yield
    except (InputError, StoppedError):
        raise
    except (Exception, SystemExit) as error:
        if caused_by_out_of_memory(error) or disk_full_reason(error):
            raise
        # The first two frames are this function and its caller, which are not the user's code.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        shown = [f for f in frames if not f.filename.startswith("<frozen importlib")]
        raise InputError(
            f"{call} must end without an error. Found {type(error).__name__}: {error}\n"
            f"{''.join(traceback.format_list(shown))}".rstrip(),
            code="study.failed",
        ) from error


def _is_number(sample_id: Any) -> bool:
    return type(sample_id) is int and -(2**63) <= sample_id < 2**63


def _is_name(sample_id: Any) -> bool:
    # Only printable characters are allowed, because HDF5 cannot store NUL in a text, and lone
    # surrogates have no UTF-8. pandas would read "nan" in an index as a missing value.
    return (
        type(sample_id) is str
        and sample_id != "nan"
        and 0 < len(sample_id.encode(errors="replace")) <= _MAX_ID_BYTES
        and sample_id.isprintable()
    )


def checked_ids(ids: Iterable[Any], n_samples: int | None, source: str) -> list[int] | list[str]:
    """Return the ids of samples as Python integers or strings, or raise an error.

    Args:
        ids: Distinct ids. Either all are 64-bit integers, or all are short printable strings.
        n_samples: The required number of ids. None allows any number.
        source: The function or the field that contains the ids, as error messages call it.
    """
    if isinstance(ids, set | frozenset):
        raise InputError(
            f"{source} must contain the ids in the order of the samples. Found a set, which has "
            "no order. Use a list.",
            code="study.ids",
        )
    plain = [i.item() if hasattr(i, "item") else i for i in ids]
    if n_samples is not None and len(plain) != n_samples:
        raise InputError(
            f"{source} must contain one id for each sample. Found {len(plain)} ids for "
            f"{n_samples} samples.",
            code="study.ids",
        )
    if not (all(map(_is_number, plain)) or all(map(_is_name, plain))):
        is_good = _is_number if type(plain[0]) is int else _is_name
        bad = [i for i in plain if not is_good(i)] or plain
        raise InputError(
            f"{source} must contain only 64-bit integers, or only printable strings of 1 to "
            f"{_MAX_ID_BYTES} bytes. The string nan is not allowed. Found "
            f"{', '.join(repr(i) for i in bad[:3])}.",
            code="study.ids",
        )
    ((commonest, count),) = Counter(plain).most_common(1)
    if count > 1:
        raise InputError(
            f"{source} must contain unique ids. Found the id {commonest!r} {count} times. Give "
            "each sample its own id.",
            code="study.ids",
        )
    return plain


def label_of(sample: Any) -> torch.Tensor:
    """Return the label of a sample as a tensor."""
    return as_tensor(sample["labels"] if isinstance(sample, Mapping) else sample[-1])


def with_label(sample: Any, label: int) -> Any:
    """Return a copy of a sample with another label. The label has the type of the old label."""
    if isinstance(sample, Mapping):
        values = {**sample, "labels": _like(sample["labels"], label)}
    else:
        values = (*sample[:-1], _like(sample[-1], label))
    return sample.replaced(values) if isinstance(sample, FromRow) else values


def _like(old: Any, label: int) -> Any:
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, label)
    return np.full_like(old, label) if isinstance(old, np.ndarray) else type(old)(label)
