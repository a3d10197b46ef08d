"""Load a study, which is a user's Python file that defines a model and data, and train its model.

A study defines these functions. Those after ``target_data`` are optional:

    make_model()             builds the torch module into which weights are loaded
    train_data()             returns the training samples: any object with len() and [i]
    target_data()            returns the samples that can be explained, in the same form
    train_ids(), target_ids()  return an integer or short name for each sample (default 0, 1, ...)
    train_columns(), target_columns()  return more values for each sample, by column name
    train(**arguments)       trains a model with arguments from the config, and returns it
    encode(**line)           converts a line of an experiment's `data` to a sample
    draw(axes, sample)       draws one sample into matplotlib axes
    describe(sample)         returns a text that describes one sample on pages
    as_read(sample)          returns the model's input for one sample, as a text
    token_texts(sample)      returns a text for each token of a sample
    class_names()            returns the names of the classes with the labels 0, 1, 2, ...

A sample is a tuple of the model's positional arguments and the label, or a dict of the model's
named arguments with the label as `labels`. Image-text pairs have no label. All samples have the
same shapes, except that texts for a language model may have different numbers of tokens.
"""

import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unicodedata import category, normalize

import torch
from torch import nn

from trak_core.errors import InputError, listed
from trak_core.settings import TRAIN
from trak_core.study.dataset_split import Split, checked_ids, users_code


class _InWords(dict[int, int | None]):
    """A ``str.translate`` table for splitting texts into words.

    It replaces all characters except letters, marks, digits and ``_`` with spaces.
    """

    def __missing__(self, code: int) -> int:
        # Marks are parts of words. For example, many vowels of Hindi are marks in Unicode.
        is_part = chr(code).isalnum() or category(chr(code)).startswith("M") or chr(code) == "_"
        self[code] = own = code if is_part else ord(" ")
        return own


# Soft hyphens and zero-width joiners are deleted, because they occur within words.
_IN_WORDS = _InWords(dict.fromkeys((0x00AD, 0x200C, 0x200D)))
_SHOWN = 400  # The number of characters shown from either end of a long text.


@contextmanager
def _training_refused(path: Path) -> Generator[None, None, None]:
    """Raise an error if ``backward()`` is called in the ``with`` block, which imports ``path``."""
    file = path.absolute()  # Frames have absolute paths, and the import may change the folder.

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        lines = (f.lineno for f in traceback.extract_stack() if Path(f.filename) == file)
        line = next(lines, None)  # None if the call comes from another thread.
        raise InputError(
            f"{path}: the file must not train when it is imported, because every job imports it. "
            f"Found that {'it' if line is None else f'line {line}'} calls backward(). "
            'Put the training under `if __name__ == "__main__":`.',
            code="study.trains",
        )

    backward = torch.autograd.backward
    torch.autograd.backward = refuse
    try:
        yield
    finally:
        torch.autograd.backward = backward


def beginning_and_end(text: str) -> str:
    """Return a text, or only its beginning and its end if it is long."""
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"


@dataclass(frozen=True, slots=True)
class Study:
    """A user's Python file that defines the model and data. Methods call its functions.

    If a function fails or returns an unsuitable result, methods raise an ``InputError``.
    """

    path: Path
    module: ModuleType

    @classmethod
    def load(cls, path: Path) -> "Study":
        """Return the study that a Python file defines, after importing the file.

        Raises:
            InputError: If the import fails, trains a model, or changes the working folder.
        """
        # As for a script, the file's folder is in sys.path, so the file can import modules from it.
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        before = Path.cwd()
        with users_code(f"{path}: the study's file"), _training_refused(path):
            spec.loader.exec_module(module)
        after = Path.cwd()
        if after != before:
            os.chdir(before)
            raise InputError(
                f"{path}: the study's file must not change the working folder, because paths in "
                f"the config are relative to it. Found a change to {after}. Leave os.chdir() out, "
                "and build the study's paths from Path(__file__).parent.",
                code="study.chdir",
            )
        return cls(path, module)

    @property
    def name(self) -> str:
        """The study as the config names it: a path, or the name of a ready-made study.

        If the config contains arguments for the study, ``path`` is a generated file that passes
        them to the study. The name of this file contains the study's name. The generated file has
        an attribute ``own`` if the study is a user's file and not a ready-made study.
        """
        written = re.fullmatch(r"(.+)_study_[0-9a-f]{8}", self.path.stem)
        if written is None:
            return str(self.path)
        return f"{written[1]}.py" if hasattr(self.module, "own") else written[1]

    def function(self, name: str) -> Callable[..., Any]:
        """Return the study's function ``name``. Raise an ``InputError`` if it is missing."""
        function = getattr(self.module, name, None)
        if not callable(function):
            own = [
                key
                for key, value in vars(self.module).items()
                if inspect.isfunction(value) and value.__module__ == self.module.__name__
            ]
            raise InputError(
                f"{self.path}: the study must define a function {name}(). Found "
                f"{', '.join(own) or 'no functions'}.",
                code="study.no_function",
            )
        return function

    def has(self, name: str) -> bool:
        """Return whether the study defines a function of this name."""
        return callable(getattr(self.module, name, None))

    @property
    def fields_read(self) -> Container[str]:
        """The fields of rows from which a ready-made study makes samples. Others become columns."""
        return getattr(getattr(self.module, "study", None), "fields_read", ())

    def make_model(self) -> nn.Module:
        """Return the module that the study's ``make_model`` builds.

        Raises:
            InputError: If it is not a module, is in TorchScript, or is on several devices.
        """
        function = self.function("make_model")
        with users_code(f"{self.path}: make_model()"):
            model = function()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.path}: make_model() must return a torch.nn.Module. Found "
                f"{type(model).__name__}.",
                code="study.model_type",
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise InputError(
                f"{self.path}: make_model() must return a model that runs as Python code. Found "
                f"{type(model).__name__} from torch.jit.script, trace or load. Return the original "
                "model. Weights of the scripted model fit, because their names are the same.",
                code="study.scripted_model",
            )
        devices = sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()})
        if len(devices) > 1:
            raise InputError(
                f"{self.path}: make_model() must return a model on one device. Found `device_map` "
                f"with {', '.join(devices)}. Leave device_map out. If the model is too large for a "
                "GPU, run with `compute: {device: cpu}`.",
                code="study.device_map",
            )
        return model

    def describe(self, sample_id: int | str, sample: Any, by: str = "describe") -> str:
        """Return the text that ``describe`` or ``as_read`` (``by``) returns for a sample."""
        function = self.function(by)
        with users_code(f"{self.path}: {by}() of sample {sample_id}"):
            text = function(sample)
        if not isinstance(text, str):
            raise InputError(
                f"{self.path}: {by}() must return a str that describes the sample. Found "
                f"{type(text).__name__} for sample {sample_id}.",
                code="study.text_type",
            )
        return text

    def first_as_read(self, split: Split) -> str:
        """Return the text from ``as_read`` for the first sample, or "" if it is not defined."""
        if not self.has("as_read"):
            return ""
        return beginning_and_end(self.describe(split.ids[0], split.sample(0), "as_read"))

    def words(self, split: Split) -> Iterator[list[str]]:
        """Yield the words of the text that ``describe`` returns for each sample.

        A word is a sequence of letters, combining marks, digits and ``_``. Words are in lower case
        and in the Unicode normal form NFKC.
        """
        for row, sample_id in enumerate(split.ids):
            # casefold() can return a text that is not in normal form, so it is normalized again.
            text = normalize("NFKC", self.describe(sample_id, split.sample(row))).casefold()
            yield normalize("NFKC", text).translate(_IN_WORDS).split()

    def token_texts(self, sample_id: int | str, sample: Any, n_tokens: int) -> list[str]:
        """Return the texts of a sample's ``n_tokens`` tokens, from the study's ``token_texts``."""
        function = self.function("token_texts")
        with users_code(f"{self.path}: token_texts() of sample {sample_id}"):
            texts = list(function(sample))
        wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
        if wrong or len(texts) != n_tokens:
            raise InputError(
                f"{self.path}: token_texts() must return a str for each of the {n_tokens} tokens "
                f"of sample {sample_id}, in their order. Found "
                f"{f'the type {wrong[0]}' if wrong else f'{len(texts)} texts'}.",
                code="study.token_texts",
            )
        return texts

    def class_names(self) -> list[str]:
        """Return the names of the classes 0, 1, 2, ..., or an empty list if they have no names."""
        if not self.has("class_names"):
            return []
        with users_code(f"{self.path}: class_names()"):
            names = list(self.function("class_names")())
        wrong = [name for name in names if not isinstance(name, str) or names.count(name) > 1]
        if wrong:
            raise InputError(
                f"{self.path}: class_names() must return a different str for each class. Found "
                f"{wrong[0]!r}, {names.count(wrong[0])} times.",
                code="study.class_names",
            )
        return names

    def split(self, name: str, targets: Sequence[int | str] | None) -> Split:
        """Return samples from ``train_data`` if ``name`` is ``TRAIN``, else from ``target_data``.

        ``targets`` contains the ids of the samples to return, in order. None returns all samples.
        """
        pool = "train" if name == TRAIN else "target"
        function = self.function(f"{pool}_data")
        with users_code(f"{self.path}: {pool}_data()"):
            samples = function()
            can_be_read = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
            size = len(samples) if can_be_read else 0
        if size == 0:
            kind = type(samples).__name__
            raise InputError(
                f"{self.path}: {pool}_data() must return at least one sample, with len() and [i], "
                f"such as a torch Dataset. Found {f'an empty {kind}' if can_be_read else kind}.",
                code="study.no_samples",
            )
        split = Split(samples, self.ids(pool, size))
        return split if targets is None else split.take(targets)

    def ids(self, pool: str, n_samples: int | None = None) -> list[int] | list[str]:
        """Return the ids of training samples or targets.

        ``pool`` is "train" for the result of the study's ``train_ids``, or "target" for that of
        ``target_ids``. If ``n_samples`` is given, the number of ids must be equal to it. If the
        study does not define the function, the ids are 0, 1, 2, ..., ``n_samples - 1``.
        """
        if n_samples is not None and not self.has(f"{pool}_ids"):
            return list(range(n_samples))
        with users_code(f"{self.path}: {pool}_ids(), which returns an id for each sample,"):
            given = self.function(f"{pool}_ids")()
            return checked_ids(given, n_samples, f"{self.path}: {pool}_ids()")


def trained_model(study: Study, arguments: dict[str, Any], data: Any = None) -> nn.Module:
    """Return the model that the study's ``train`` returns or yields last.

    ``arguments`` are passed to ``train`` by name. If ``data`` is not None, it contains the samples
    to train on, and is passed to ``train`` as the argument ``data``.

    Raises:
        InputError: If ``train`` fails, or if weights are not finite.
    """
    last = deque(_steps(study, arguments, data), maxlen=1)
    return _checked(study, arguments, last[0][1] if last else None)


def models_along(
    study: Study, arguments: dict[str, Any], times: list[float]
) -> Generator[nn.Module]:
    """Train a model, and yield it at each of the ascending ``times``, such as numbers of epochs.

    The study's ``train`` must be a generator that yields (time, model) at least at these times.

    Yields:
        The model at each time. It may be the same object each time, updated in place.

    Raises:
        InputError: If ``train`` fails or misses a time, or if weights are not finite.
    """
    remaining = list(times)
    passed: list[str] = []
    with closing(_steps(study, arguments)) as steps:
        for at, model in steps:
            passed.append(f"{at:g}")
            if at == remaining[0]:
                del remaining[0]
                yield _checked(study, arguments, model)
            if not remaining:
                return
            if at > remaining[0]:
                break
    raise InputError(
        f"{study.path}: train({arguments}) must yield (time, model) at each time under `at`. Found "
        f"no model at {remaining[0]!r}, but models at {listed(passed) or 'no time'}. Yield a model "
        "at this time, or change `at` in the config.",
        code="study.train",
    )


def _steps(
    study: Study, arguments: dict[str, Any], data: Any = None
) -> Generator[tuple[float, Any]]:
    """Yield the pairs (time, model) that ``train`` yields, or (0, model) if it returns a model."""
    train = study.function("train")
    call = f"{study.path}: train({arguments}), which returns a model or yields (time, model),"
    with users_code(call):
        result = train(**arguments, **({} if data is None else {"data": data}))
    if not inspect.isgenerator(result):
        yield 0.0, result
        return
    with closing(result):
        while True:
            with users_code(call):
                step: Any = next(result, None)
                if step is None:
                    return
                time, model = step
                time = float(time)
            yield time, model


def _checked(study: Study, arguments: dict[str, Any], model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{study.path}: train() must return the trained torch.nn.Module, or yield pairs of a "
            f"time and the module. Found {type(model).__name__}.",
            code="study.train",
        )
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise InputError(
                f"{study.path}: train({arguments}) must return a model with finite weights. Found "
                f"NaN or infinity in {name}, so training diverged. Try a smaller learning rate.",
                code="study.train",
            )
    return model
