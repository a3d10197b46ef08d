"""A study: the user's Python file that says what the model and the data are.

Its functions, each without arguments unless said otherwise:

    make_model()             the torch module, weights unset
    train_data()             the training samples: anything with len() and [i]
    target_data()            the pool of samples to explain, likewise
    train_ids(), target_ids()  optional: one id a sample, integers or short names; else 0, 1, 2, ...
    train(**arguments)       optional: trains and returns a model; arguments come from the config
    encode(**line)           optional: makes a sample of a line of an experiment's own `data`
    draw(axes, sample)       optional: draws one sample into matplotlib axes
    describe(sample)         optional: returns one sample as a text to read

A sample is a tuple: the model's positional arguments, then the label. Or it is a dict: the model's
named arguments, and the label as `labels`. Image-text pairs have no label. Samples have the same
shapes, but texts of a language model: these may differ in their number of tokens.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from trak_core.errors import InputError, ToldToStopError
from trak_core.system.job import came_from_no_memory, no_room

TRAIN = "train"
_MAX_ID = 64


class Samples(Protocol):
    """Map-style data: what ``torch.utils.data.Dataset`` with a length is."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one sample, a tuple whose last entry is the label, or a dict with `labels`."""
        ...


@dataclass(frozen=True, slots=True)
class Split:
    """Samples with their ids, all integers or all strings."""

    samples: Samples
    ids: list[int] | list[str]

    def take(self, ids: Sequence[int | str]) -> "Split":
        """Return the samples with these ids, in this order.

        Raises:
            InputError: If an id is not there, or twice in ``ids``.
        """
        position = {sample_id: i for i, sample_id in enumerate(self.ids)}
        unknown = [i for i in ids if i not in position]
        if unknown:
            raise InputError(
                "Targets must be ids of the study's target_data(), or of the experiment's own "
                f"data. Found {', '.join(map(str, unknown[:8]))}"
                f"{' and more' if len(unknown) > 8 else ''}; it has {len(position)}, such as "
                f"{self.ids[0]} and {self.ids[-1]}."
            )
        if len(set(ids)) < len(ids):
            twice = sorted({str(i) for i in ids if list(ids).count(i) > 1})
            raise InputError(f"A target must be listed once. Found twice: {', '.join(twice[:8])}.")
        rows = [position[i] for i in ids]
        return Split(torch.utils.data.Subset(cast(Any, self.samples), rows), list(ids))  # pyright: ignore[reportArgumentType]

    def batch(self, start: int, stop: int) -> tuple[Tensor, ...] | dict[str, Tensor]:
        """Return samples ``start`` to ``stop`` as stacked tensors, in a tuple or dict as they are.

        Raises:
            InputError: If the samples cannot be stacked.
        """
        samples = []
        for i in range(start, stop):
            with users_code(f"reading sample {self.ids[i]}"):
                samples.append(self.samples[i])
        parts = [_entries(sample) for sample in samples]
        for sample_id, part in zip(self.ids[start:stop], parts, strict=True):
            if part.keys() != parts[0].keys():
                raise InputError(
                    f"Samples must be tuples of one length, or dicts with the same keys. Found "
                    f"{_listed(parts[0])} in sample {self.ids[start]}, {_listed(part)} in sample "
                    f"{sample_id}."
                )
        stacked = {key: _stacked([part[key] for part in parts], key) for key in parts[0]}
        return stacked if isinstance(samples[0], Mapping) else tuple(stacked.values())


def _entries(sample: Any) -> dict[str, Any]:
    """Return the entries of a sample by name or number."""
    if isinstance(sample, Mapping):
        return dict(sample)
    if isinstance(sample, list | tuple):
        return {f"entry {i}": entry for i, entry in enumerate(sample)}
    raise InputError(f"A sample must be a tuple or a dict. Found {type(sample).__name__}.")


def _listed(entries: Mapping[str, Any]) -> str:
    return ", ".join(entries) or "nothing"


def _stacked(parts: Sequence[Any], name: str) -> Tensor:
    """Stack one entry of several samples: tensors, arrays, numbers or lists of numbers."""
    try:
        # default_collate takes a list of numbers for numbers of several samples.
        tensors = [torch.as_tensor(p) if isinstance(p, list) else p for p in parts]
        stacked = default_collate(tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = {str(tuple(p.shape)) if hasattr(p, "shape") else type(p).__name__ for p in parts}
        raise InputError(
            "Samples must be tuples or dicts of tensors or numbers, with the same shapes in every "
            f"sample (texts padded to one length). Found {', '.join(sorted(shapes)[:4])} for "
            f"{name}: {(str(error).splitlines() or [''])[0]}"
        ) from error
    if not isinstance(stacked, Tensor):
        raise InputError(
            "Samples must be tuples or dicts of tensors or numbers. Found "
            f"{type(parts[0]).__name__} for {name}."
        )
    return stacked


@contextmanager
def users_code(what: str) -> Generator[None, None, None]:
    """Make an exception of the study's own code one message that says where it came from.

    Args:
        what: What runs, for the message.

    Raises:
        InputError: In place of any other exception, SystemExit included; but for a full disk or
            memory, and a job that is told to stop, which are no mistakes of the study's.
    """
    try:
        yield
    except (InputError, ToldToStopError):
        raise
    except (Exception, SystemExit) as error:
        if came_from_no_memory(error) or no_room(error):
            raise
        # Without this function's frame, and the one that called the study's code.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        shown = [f for f in frames if not f.filename.startswith("<frozen importlib")]
        raise InputError(
            f"{what} must end without an error. Found {type(error).__name__}: {error}\n"
            f"{''.join(traceback.format_list(shown))}".rstrip()
        ) from error


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path}: the study's Python file must exist. Found nothing there.")
    # Modules beside the study import as they would for a script.
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with users_code(f"{path}: the study's file"):
        spec.loader.exec_module(module)
    return module


def _is_number(sample_id: Any) -> bool:
    return type(sample_id) is int and -(2**63) <= sample_id < 2**63


def _is_name(sample_id: Any) -> bool:
    # HDF5 fills up fixed-length strings with NUL; lone surrogates have no UTF-8.
    return (
        type(sample_id) is str
        and "\0" not in sample_id
        and 0 < len(sample_id.encode(errors="replace")) <= _MAX_ID
        and sample_id.isprintable()
    )


def checked_ids(ids: Sequence[Any], n_samples: int, function: str) -> list[int] | list[str]:
    """Return plain ids, one a sample.

    Raises:
        InputError: If they are not all integers or all short names, or not all different.
    """
    plain = [i.item() if hasattr(i, "item") else i for i in ids]
    if len(plain) != n_samples:
        raise InputError(
            f"{function} must give one id a sample. Found {len(plain)} ids, {n_samples} samples."
        )
    if not (all(map(_is_number, plain)) or all(map(_is_name, plain))):
        is_good = _is_number if type(plain[0]) is int else _is_name
        found = [i for i in plain if not is_good(i)] or plain
        raise InputError(
            f"{function} must give integers of 64 bits only, or strings of 1 to {_MAX_ID} bytes "
            f"of printable text only. Found {', '.join(repr(i) for i in found[:3])}."
        )
    if len(set(plain)) < n_samples:
        twice = next(i for i, one in enumerate(plain) if one in plain[:i])
        raise InputError(
            f"{function} must give every sample its own id. Found repeated ids: {plain[twice]!r}."
        )
    return plain


@dataclass(frozen=True, slots=True)
class Study:
    """The functions of a study's file, checked as they are used."""

    path: Path
    module: ModuleType

    @classmethod
    def load(cls, path: Path) -> "Study":
        """Return the study in a Python file, which is run.

        Raises:
            InputError: If there is no such file.
        """
        return cls(path, _run(path))

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of the study's functions.

        Raises:
            InputError: If the file defines no such function.
        """
        found = getattr(self.module, name, None)
        if not callable(found):
            own = [
                n
                for n, v in vars(self.module).items()
                if getattr(v, "__module__", None) == self.module.__name__ and callable(v)
            ]
            raise InputError(
                f"{self.path}: the study must define a function {name}(). Found "
                f"{', '.join(own) or 'no functions'}."
            )
        return found

    def has(self, name: str) -> bool:
        """Return whether the study defines a function of this name."""
        return callable(getattr(self.module, name, None))

    def make_model(self) -> nn.Module:
        """Return the study's model, weights unset.

        Raises:
            InputError: If make_model() returns anything but a torch module.
        """
        function = self.function("make_model")
        with users_code(f"{self.path}: make_model()"):
            model = function()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.path}: make_model() must return a torch.nn.Module. Found "
                f"{type(model).__name__}."
            )
        return model

    def describe(self, sample_id: int | str, sample: Any) -> str:
        """Return the study's own words for a sample, as they are.

        Raises:
            InputError: If describe() fails, or returns anything but a str.
        """
        function = self.function("describe")
        with users_code(f"{self.path}: describe() of sample {sample_id}"):
            text = function(sample)
        if not isinstance(text, str):
            raise InputError(
                f"{self.path}: describe() must return a str, the sample as a text to read. Found "
                f"{type(text).__name__} for sample {sample_id}."
            )
        return text

    def split(self, name: str, targets: Sequence[int | str] | None) -> Split:
        """Return the training samples, or the targets of an experiment.

        Args:
            name: ``"train"``, or anything else for targets.
            targets: The ids of the experiment's targets, in order; None for the training samples.

        Raises:
            InputError: If data or ids are not what they must be.
        """
        pool = "train" if name == TRAIN else "target"
        function = self.function(f"{pool}_data")
        with users_code(f"{self.path}: {pool}_data()"):
            samples = function()
        if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
            raise InputError(
                f"{self.path}: {pool}_data() must return samples with len() and [i], such as a "
                f"torch Dataset. Found {type(samples).__name__}."
            )
        with users_code(f"{self.path}: len() of {pool}_data()"):
            size = len(samples)
        if size == 0:
            raise InputError(f"{self.path}: {pool}_data() must hold samples. Found none.")
        ids = list(range(size))
        if self.has(f"{pool}_ids"):
            function = self.function(f"{pool}_ids")
            with users_code(f"{self.path}: {pool}_ids(), which gives one id a sample,"):
                ids = list(function())
        split = Split(samples, checked_ids(ids, size, f"{self.path}: {pool}_ids()"))
        return split if targets is None else split.take(targets)
