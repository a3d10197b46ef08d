"""Load a study, the user's Python file that says what model and data are, and have it train.

Its functions take no arguments unless said otherwise:

    make_model()             the torch module, weights unset
    train_data()             the training samples: anything with len() and [i]
    target_data()            the pool of samples to explain, likewise
    train_ids(), target_ids()  optional: one id a sample, integers or short names; else 0, 1, 2, ...
    train_columns(), target_columns()  optional: what is known of the samples, values by name
    train(**arguments)       optional: trains and returns a model; arguments come from the config
    encode(**line)           optional: makes a sample of a line of an experiment's own `data`
    draw(axes, sample)       optional: draws one sample into matplotlib axes
    describe(sample)         optional: returns one sample as a text to read
    as_read(sample)          optional: returns what the model reads of one sample, as a text
    token_texts(sample)      optional: returns what stands for each of its tokens, a list of texts
    class_names()            optional: names of the classes, in the order of the labels 0, 1, 2, ...

A sample is a tuple: the model's positional arguments, then the label. Or it is a dict: the model's
named arguments, and the label as `labels`. Image-text pairs have no label. All samples have the
same shapes; only texts of a language model may differ, in their number of tokens.
"""

import ast
import importlib.util
import inspect
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unicodedata import category, normalize

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.spec import TRAIN
from trak_core.study.dataset_split import Samples, Split, checked_ids, users_code


class _InWords(dict[int, int | None]):
    """Characters that words are made of, by themselves, and a space for all others."""

    def __missing__(self, code: int) -> int:
        # Half of Hindi's vowels are marks, which are no letters.
        is_part = chr(code).isalnum() or category(chr(code)).startswith("M") or chr(code) == "_"
        self[code] = own = code if is_part else ord(" ")
        return own


# Soft hyphens and zero-width joiners stand within words, and say only how these look.
_IN_WORDS = _InWords(dict.fromkeys((0x00AD, 0x200C, 0x200D)))


# Characters of a text that are shown from its beginning, and from its end.
_SHOWN = 400

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trains_when_run(path: Path) -> str | None:
    """Return the first call outside of functions that leads to ``backward()``, and its line.

    Calls are followed through the file's own functions, methods left out; what stands below a
    question about ``__name__`` doesn't count. None for a file without one, or that Python can't
    parse: running it says so better.
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return None
    called = {
        node.name: [part for part in ast.walk(node) if isinstance(part, ast.Call)]
        for node in body
        if isinstance(node, _Function)
    }
    training: set[str] = set()
    for _ in called:
        training |= {name for name, calls in called.items() if _first(calls, training)}
    for node in body:
        is_question = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        call = None if is_question else _first(_calls_at_once(node), training)
        if call is not None:
            name = call.func.id if isinstance(call.func, ast.Name) else "backward"
            return f"{name}() called in line {call.lineno}"
    return None


def _calls_at_once(node: ast.AST) -> list[ast.Call]:
    """Return the calls of a statement, without those that wait in functions and classes."""
    if isinstance(node, _Function | ast.ClassDef | ast.Lambda):
        return []
    own = [node] if isinstance(node, ast.Call) else []
    return own + [call for part in ast.iter_child_nodes(node) for call in _calls_at_once(part)]


def _first(calls: list[ast.Call], training: set[str]) -> ast.Call | None:
    """Return the first call of ``backward()``, or of a function that trains."""
    for call in calls:
        named = call.func.id if isinstance(call.func, ast.Name) else None
        if getattr(call.func, "attr", "") == "backward" or named in training:
            return call
    return None


def beginning_and_end(text: str) -> str:
    """Return a text, or the beginning and the end of a long one, for a person to read."""
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"


@dataclass(frozen=True, slots=True)
class Study:
    """The functions of a study's file, checked as they are used."""

    path: Path
    module: ModuleType

    @classmethod
    def load(cls, path: Path) -> "Study":
        """Return the study in a Python file, which is run: not one that would train by it."""
        if not path.is_file():
            raise InputError(f"{path}: the study's Python file must exist. Found nothing there.")
        training = _trains_when_run(path)
        if training is not None:
            raise InputError(
                f"{path}: the file must not train when it is imported, because every job imports "
                f'it. Found {training}. Put what trains under `if __name__ == "__main__":`.',
                code="study.trains",
            )
        # Modules beside the study import as they would for a script.
        sys.path.insert(0, str(path.parent.resolve()))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        before = Path.cwd()
        with users_code(f"{path}: the study's file"):
            spec.loader.exec_module(module)
        after = Path.cwd()
        if after != before:
            os.chdir(before)
            raise InputError(
                f"{path}: the study's file must not change the working folder, because the "
                f"config's paths count from it. Found a change to {after}. Leave os.chdir() out, "
                "and begin the study's own paths with Path(__file__).parent.",
                code="study.chdir",
            )
        return cls(path, module)

    @property
    def name(self) -> str:
        """What the config calls it: its file, or the ready-made study that it was written for.

        ``bind_study_arguments`` names such files, and marks by ``own`` those that pass on a user's.
        """
        written = re.fullmatch(r"(.+)_study_[0-9a-f]{8}", self.path.stem)
        if written is None:
            return str(self.path)
        return f"{written[1]}.py" if hasattr(self.module, "own") else written[1]

    def function(self, name: str) -> Callable[..., Any]:
        """Return one of the study's functions; without it, raise an InputError."""
        function = getattr(self.module, name, None)
        if not callable(function):
            own = [
                n
                for n, v in vars(self.module).items()
                if getattr(v, "__module__", None) == self.module.__name__ and callable(v)
            ]
            raise InputError(
                f"{self.path}: the study must define a function {name}(). Found "
                f"{', '.join(own) or 'no functions'}."
            )
        return function

    def has(self, name: str) -> bool:
        """Return whether the study defines a function of this name."""
        return callable(getattr(self.module, name, None))

    def make_model(self) -> nn.Module:
        """Return the study's model, weights unset; anything but a module is an InputError."""
        function = self.function("make_model")
        with users_code(f"{self.path}: make_model()"):
            model = function()
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self.path}: make_model() must return a torch.nn.Module. Found "
                f"{type(model).__name__}."
            )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise InputError(
                f"{self.path}: make_model() must return a model in Python, whose layers can be "
                f"watched. Found {type(model).__name__} with code of torch.jit.script, trace or "
                "load. Return the model that it was made of; `module.state_dict()` has the "
                "checkpoint's weights under the same names.",
                code="study.scripted_model",
            )
        places = sorted({str(place) for place in getattr(model, "hf_device_map", {}).values()})
        if len(places) > 1:
            raise InputError(
                f"{self.path}: make_model() must return a model that lies on one device: a job "
                "moves it to its own and splits samples, not layers. Found `device_map` with "
                f"{', '.join(places)}. Leave device_map out. If the model is too large for one "
                "GPU, run with `compute: {device: cpu}`, or attribute to an adapter of a smaller "
                "one.",
                code="study.device_map",
            )
        return model

    def describe(self, sample_id: int | str, sample: Any, by: str = "describe") -> str:
        """Return the text of a sample that the study's ``describe`` or ``as_read`` returns."""
        function = self.function(by)
        with users_code(f"{self.path}: {by}() of sample {sample_id}"):
            text = function(sample)
        if not isinstance(text, str):
            raise InputError(
                f"{self.path}: {by}() must return a str, the sample as a text to read. Found "
                f"{type(text).__name__} for sample {sample_id}."
            )
        return text

    def first_as_read(self, split: Split) -> str:
        """Return what the model reads of the first sample; empty if the study doesn't say it."""
        if not self.has("as_read"):
            return ""
        with users_code(f"reading sample {split.ids[0]}"):
            sample = split.samples[0]
        text = self.describe(split.ids[0], sample, "as_read")
        return beginning_and_end(text)

    def words(self, split: Split) -> Iterator[list[str]]:
        """Yield the words of each sample's text, as ``describe`` says it, whatever their case.

        A word is a run of letters with their marks, digits and ``_``, in Unicode's form NFKC.
        """
        for row, sample_id in enumerate(split.ids):
            with users_code(f"reading sample {sample_id}"):
                sample = split.samples[row]
            text = normalize("NFKC", self.describe(sample_id, sample)).casefold()  # undoes NFKC
            yield normalize("NFKC", text).translate(_IN_WORDS).split()

    def token_texts(self, sample_id: int | str, sample: Any, n_tokens: int) -> list[str]:
        """Return the study's words for each token of a sample, which has so many."""
        function = self.function("token_texts")
        with users_code(f"{self.path}: token_texts() of sample {sample_id}"):
            texts = list(function(sample))
        wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
        if wrong or len(texts) != n_tokens:
            raise InputError(
                f"{self.path}: token_texts() must return a text for each of the {n_tokens} tokens "
                f"of sample {sample_id}, in their order. Found "
                f"{wrong[0] if wrong else len(texts)}.",
                code="study.token_texts",
            )
        return texts

    def class_names(self) -> list[str]:
        """Return the classes' names by their number; none if the study doesn't name them."""
        if not self.has("class_names"):
            return []
        with users_code(f"{self.path}: class_names()"):
            names = list(self.function("class_names")())
        wrong = [type(name).__name__ for name in names if not isinstance(name, str)]
        if wrong:
            raise InputError(
                f"{self.path}: class_names() must return a list of texts. Found {wrong[0]} in it.",
                code="study.class_names",
            )
        again = [name for name in dict.fromkeys(names) if names.count(name) > 1]
        if again:
            raise InputError(
                f"{self.path}: class_names() must return a different name for each class. Found "
                f"{again[0]!r} {names.count(again[0])} times.",
                code="study.class_names",
            )
        return names

    def split(self, name: str, targets: Sequence[int | str] | None) -> Split:
        """Return the training samples, for the name ``TRAIN``, or the targets of an experiment.

        ``targets`` are their ids, in order; None for all samples.
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


def trained_model(
    study: Study,
    arguments: dict[str, Any],
    data: Samples | None = None,
    sample_weights: torch.Tensor | None = None,
) -> nn.Module:
    """Return the model that the study's ``train`` returns or yields last, with finite weights.

    It gets ``arguments`` by name, the samples ``data``, and ``sample_weights``, float32, of shape
    (n,): what each sample's loss is multiplied by. What is None isn't passed: then ``train`` takes
    all samples, each with weight 1.
    """
    last = deque(_steps(study, arguments, data, sample_weights), maxlen=1)
    return _checked(study, arguments, last[0][1] if last else None)


def models_along(
    study: Study, arguments: dict[str, Any], times: list[float]
) -> Generator[tuple[float, nn.Module]]:
    """Train up to the last of the times, and yield each time with the model.

    It is one object, trained further between two of them. The ``times`` ascend; ``arguments`` are
    as in ``trained_model``. A generator ``train`` must yield (time, model) at every one of them,
    with finite weights.

    Yields:
        The time, and the model there.
    """
    remaining = list(times)
    passed: list[str] = []
    with closing(_steps(study, arguments)) as steps:
        for at, model in steps:
            passed.append(repr(at))
            if at == remaining[0]:
                yield remaining.pop(0), _checked(study, arguments, model)
            if not remaining:
                return
            if at > remaining[0]:
                break
    if len(passed) > 12:
        passed[6:-3] = ["..."]
    raise InputError(
        f"{study.path}: train({arguments}) must yield (time, model) at each time under `at`. Found "
        f"none at {remaining[0]!r}; it yielded at {', '.join(passed) or 'none'}."
    )


def _steps(
    study: Study,
    arguments: dict[str, Any],
    data: Samples | None = None,
    sample_weights: torch.Tensor | None = None,
) -> Generator[tuple[float, Any]]:
    """Yield what ``train`` yields, or the model it returns."""
    more = {"data": data, "sample_weights": sample_weights}
    train = study.function("train")
    call = f"{study.path}: train({arguments})"
    with users_code(call):
        result = train(**arguments, **{k: v for k, v in more.items() if v is not None})
    if not inspect.isgenerator(result):
        yield 0.0, result
        return
    with closing(result):
        while True:
            with users_code(call):
                step = next(result, None)
            if step is None:
                return
            yield _time_and_model(study, step)


def _time_and_model(study: Study, step: Any) -> tuple[float, nn.Module]:
    is_pair = isinstance(step, tuple) and len(step) == 2
    if not is_pair or isinstance(step[0], bool) or not isinstance(step[0], int | float):
        types = [type(entry).__name__ for entry in (step if is_pair else [step])]
        raise InputError(
            f"{study.path}: train() must yield a number, the time in the run, and the model. Found "
            f"{', '.join(types)}."
        )
    return step[0], step[1]


def _checked(study: Study, arguments: dict[str, Any], model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{study.path}: train() must return the trained torch.nn.Module, or yield it with the "
            f"time. Found {type(model).__name__}."
        )
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise InputError(
                f"{study.path}: train({arguments}) must return finite weights. Found NaN or "
                f"infinity in {name}: training diverged."
            )
    return model
