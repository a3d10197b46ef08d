"""Read the data that a Python program hands over: tensors, a Dataset or a DataLoader."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from trak_core.errors import InputError
from trak_core.study.dataset_split import Split, checked_ids

# Samples that are read twice.
_READ_AGAIN = 32


@dataclass(frozen=True, slots=True)
class _Columns:
    """Tensors with a row a sample, by name or in order."""

    columns: Mapping[Any, Any]
    is_named: bool

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Any:
        sample = {name: tensor[index] for name, tensor in self.columns.items()}
        return sample if self.is_named else tuple(sample.values())


@dataclass(frozen=True, slots=True)
class _Collated:
    """Samples of a DataLoader with a ``collate_fn`` of its own, which makes a batch of each."""

    loader: DataLoader[Any]

    def __len__(self) -> int:
        return len(self.loader.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Any:
        dataset: Any = self.loader.dataset
        collate: Any = self.loader.collate_fn
        batch = collate([dataset[index]])
        if isinstance(batch, Mapping):
            return {name: values[0] for name, values in batch.items()}
        return tuple(values[0] for values in batch)


def _columns_of(data: Mapping[str, Any] | tuple[Any, ...]) -> _Columns:
    given = dict(data if isinstance(data, Mapping) else enumerate(data))
    columns = {
        name: torch.as_tensor(values)
        for name, values in given.items()
        if isinstance(values, Tensor | np.ndarray) and values.ndim
    }
    if not columns or len(columns) < len(given) or len({*map(len, columns.values())}) > 1:
        shapes = [str(getattr(v, "shape", type(v).__name__)) for v in given.values()]
        raise InputError(
            "Data in tensors must be a tuple, the model's inputs and last the labels, or a dict "
            "with `labels`; each tensor has a row a sample. Found "
            f"{', '.join(shapes) or 'nothing'}. A list is read as samples, one an entry.",
            code="study.given_tensors",
        )
    return _Columns(columns, isinstance(data, Mapping))


def _dataset_of(loader: DataLoader[Any]) -> Any:
    if not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        raise InputError(
            "A DataLoader must take all samples of its dataset. Found the sampler "
            f"{type(loader.sampler).__name__}. Give the samples as a Dataset, such as a Subset.",
            code="study.given_sampler",
        )
    return loader.dataset if loader.collate_fn is default_collate else _Collated(loader)


def split_of_data(data: Any, ids: Iterable[Any] | None) -> Split:
    """Return samples with their ids.

    Args:
        data: A tuple of tensors or arrays, a row a sample: the model's inputs and, last, the
            labels. A dict of them: the model's named inputs and ``labels``. Anything with ``len()``
            and ``[i]`` whose entries are samples: a torch Dataset, a list, a Hugging Face dataset.
            A ``Split``, which has ids. Or a DataLoader: its dataset in order, whatever ``shuffle``,
            ``batch_size`` and ``drop_last`` are; a ``collate_fn`` gets one sample at a time.
        ids: An id a sample, integers or short texts; None for 0, 1, 2, ...
    """
    if isinstance(data, Split):
        return data
    if isinstance(data, DataLoader):
        data = _dataset_of(data)
    if isinstance(data, Mapping) or (isinstance(data, tuple) and not hasattr(data, "_fields")):
        data = _columns_of(data)
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise InputError(
            "Data must be tensors, a DataLoader, or samples with len() and [i], such as a torch "
            f"Dataset. Found {type(data).__name__}. `list(data)` makes samples of an iterable.",
            code="study.given_data",
        )
    size = len(data)
    if size == 0:
        raise InputError("Data must hold samples. Found none.", code="study.given_nothing")
    split = Split(data, checked_ids(range(size) if ids is None else [*ids], size, "`ids`"))
    spread = [i * (size - 1) // (_READ_AGAIN - 1) for i in range(_READ_AGAIN)]
    first = subset_digest(split, spread)
    if first != subset_digest(split, spread):
        raise InputError(
            "Data must give the same sample each time it is read, because every checkpoint reads "
            f"it. Found other values when {_READ_AGAIN} samples were read again: is there random "
            "augmentation? Give the data without it.",
            code="study.given_random",
        )
    return split


def subset_digest(split: Split, rows: Iterable[int]) -> str:
    """Hash the content of some samples, which are read: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        batch = split.batch(row, row + 1)
        for name, tensor in batch.items() if isinstance(batch, dict) else enumerate(batch):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            values = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
