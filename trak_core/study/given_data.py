"""Convert data from a Python program (tensors, a Dataset or a DataLoader) to samples with ids."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    default_collate,
)

from trak_core.dependency_digests import content_digest
from trak_core.errors import InputError
from trak_core.study.dataset_split import Split, as_tensor, checked_ids
from trak_core.study.load_checkpoint import hash_tensors

_READ_TWICE = 32  # The number of samples that are read twice, to notice random augmentation.


@dataclass(frozen=True, slots=True)
class _Collated:
    """The samples of a DataLoader's dataset, each converted by ``collate_fn`` as a batch of one."""

    loader: DataLoader[Any]

    def __len__(self) -> int:
        return len(self.loader.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        dataset: Any = self.loader.dataset
        collate: Any = self.loader.collate_fn
        batch = collate([dataset[index]])
        named = dict(batch if isinstance(batch, Mapping) else enumerate(batch))
        for name, values in named.items():
            if not hasattr(values, "__len__") or len(values) != 1:
                size = getattr(values, "shape", type(values).__name__)
                raise InputError(
                    "A DataLoader's collate_fn must return tensors with a row for each sample. "
                    f"For a batch of one sample, it returned {size} as entry {name}. Pass a "
                    "Dataset instead.",
                    code="study.given_collate",
                )
        sample = {name: values[0] for name, values in named.items()}
        return sample if isinstance(batch, Mapping) else tuple(sample.values())


def _columns_of(data: Mapping[str, Any] | tuple[Any, ...]) -> StackDataset:
    given = dict(data if isinstance(data, Mapping) else enumerate(data))
    with warnings.catch_warnings():
        # A tensor shares memory with its array. If the array is read-only, such as one from pandas,
        # torch warns not to write to the tensor. The code never writes to these tensors.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        columns: Any = {k: as_tensor(v) for k, v in given.items() if _has_rows_of_numbers(v)}
    if not columns or len(columns) < len(given) or len({*map(len, columns.values())}) > 1:
        raise InputError(
            "Data that are passed as tensors must be a tuple of the model's inputs and then the "
            "labels, or a dict with the key `labels`. Each entry must be a tensor or an array of "
            "numbers, with a row for each sample. Found "
            f"{', '.join(map(_kind_of, given.values())) or 'nothing'}. Convert pandas objects "
            "with `.to_numpy()`, texts to numbers, and masked arrays with `.filled()`. If the data "
            "are a DatasetDict, pass one of its splits. Pass a list of samples as a list, not a "
            "tuple.",
            code="study.given_tensors",
        )
    return StackDataset(**columns) if isinstance(data, Mapping) else StackDataset(*columns.values())


def _has_rows_of_numbers(values: Any) -> bool:
    is_array = isinstance(values, np.ndarray) and values.dtype.kind in "biufc"
    is_whole = (is_array and not np.ma.is_masked(values)) or isinstance(values, Tensor)
    return is_whole and values.ndim > 0


def _kind_of(values: Any) -> str:
    known = (getattr(values, key, "") for key in ("dtype", "shape"))
    return " ".join([type(values).__name__, *filter(None, map(str, known))])


def _dataset_of(loader: DataLoader[Any]) -> Any:
    """Return the samples of a DataLoader. It must use each sample exactly once in an epoch."""
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    is_shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement
    takes_each = is_shuffled or isinstance(sampler, SequentialSampler)
    takes_all = takes_each and len(sampler) == len(loader.dataset)  # pyright: ignore[reportArgumentType]
    if type(batches) is not BatchSampler or not takes_all:
        kind = "none (batch_size=None)" if batches is None else type(sampler).__name__
        raise InputError(
            "A DataLoader must use each sample of its dataset exactly once. Found the sampler "
            f"{kind}. Pass the samples as a Dataset, such as a Subset.",
            code="study.given_sampler",
        )
    return loader.dataset if loader.collate_fn is default_collate else _Collated(loader)


def split_of_data(data: Any, ids: Iterable[Any] | None) -> Split:
    """Return the samples in ``data`` with their ids.

    Args:
        data: Samples in one of three forms. Tensors or arrays with a row for each sample are passed
            as a tuple (the model's inputs, then the labels) or as a dict (the model's named inputs
            and ``labels``). Any other object must have ``len()`` and ``[i]``, such as a list, a
            torch Dataset, a ``Split``, or a Hugging Face ``datasets.Dataset``, in which the column
            ``id`` can contain the ids. The dataset of a DataLoader is read in order, and each
            sample is passed to ``collate_fn``. Shuffling and ``drop_last`` have no effect.
        ids: An integer or a short text for each sample. By default, ids are 0, 1, 2, ...
    """
    if hasattr(data, "remove_columns") and hasattr(data, "__len__") and "id" in data.column_names:
        ids = data.with_format(None)["id"] if ids is None else ids
        data = data.remove_columns("id")
    if isinstance(data, Split):
        return data
    if isinstance(data, DataLoader):
        data = _dataset_of(data)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and not hasattr(data, "_fields")):
        data = _columns_of(data)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or hasattr(data, "iloc"):
        raise InputError(
            "Data must be tensors, a DataLoader, or samples with len() and [i], such as a torch "
            f"Dataset. Found {type(data).__name__}. Convert an iterable with `list(data)`, "
            "and pandas objects with `(inputs.to_numpy(), labels.to_numpy())`.",
            code="study.given_data",
        )
    if isinstance(data, list):
        data = [*data]  # The user may change the list later, and scores refer to positions.
    size = len(data)
    if size == 0:
        raise InputError(
            "Data must contain at least one sample. Found none. Check how the data were selected.",
            code="study.given_nothing",
        )
    split = Split(data, checked_ids(range(size) if ids is None else ids, size, "`ids`"))
    check_repeatable(split)
    return split


def check_repeatable(split: Split) -> None:
    """Raise an error if a sample differs when it is read again, for example due to augmentation.

    Up to 32 samples at equal distances in the split are read twice and compared.
    """
    last = len(split.ids) - 1
    rows = sorted({i * last // (_READ_TWICE - 1) for i in range(_READ_TWICE)})
    first, again = ([_sample_digest(split, [row]) for row in rows] for _ in range(2))
    changed = [split.ids[row] for row, a, b in zip(rows, first, again, strict=True) if a != b]
    if changed:
        raise InputError(
            "A sample must be the same whenever it is read. Found different values when sample "
            f"{changed[0]} was read twice. Remove random steps such as augmentation, and prepare "
            "samples as for evaluation.",
            code="study.random_samples",
        )


def split_digest(split: Split) -> str:
    """Return a hash of the ids and contents of all samples, to notice changed data."""
    return content_digest(split.ids, _sample_digest(split, range(len(split.ids))))


def _sample_digest(split: Split, rows: Iterable[int]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        batch = split.batch(row, row + 1)
        hash_tensors(digest, batch if isinstance(batch, dict) else dict(enumerate(batch)))
    return digest.hexdigest()
