"""Say what a ready-made study consists of, and find functions that its arguments name."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from torch import nn

from trak_core.errors import InputError
from trak_core.study.study import Study
from trak_core.study.targets import shortened


@dataclass(frozen=True, slots=True)
class ReadyStudy:
    """The functions of a study (``trak_core.study.study`` says what each does)."""

    make_model: Callable[[], nn.Module]
    train_data: Callable[[], Any]
    target_data: Callable[[], Any]
    train_ids: Callable[[], Sequence[int | str]]
    target_ids: Callable[[], Sequence[int | str]]
    encode: Callable[..., Any]
    describe: Callable[[Any], str]
    train_columns: Callable[[], pd.DataFrame]
    target_columns: Callable[[], pd.DataFrame]
    draw: Callable[[Any, Any], None] | None = None
    token_texts: Callable[[Any], list[str]] | None = None
    class_names: Callable[[], list[str]] | None = None


class Rows:
    """Samples that are made of rows as they are needed."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], sample: Callable[[Mapping[str, Any]], Any]
    ) -> None:
        self._rows, self._sample = rows, sample

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._sample(self._rows[index])


def encoder(
    sample: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any], names: Iterable[str]
) -> Callable[..., Any]:
    """Return the study's ``encode``: a sample of a line, which must have the fields ``names``.

    ``row`` is one that has them, for who must be told what a line is.
    """
    example = {name: row.get(name, "...") for name in names}

    def encode(**line: Any) -> Any:
        if not example.keys() <= line.keys():
            raise InputError(
                f"A line must be a JSON object with {' and '.join(example)}, such as "
                f"{shortened(example)}. Found {shortened(line)}.",
                code="studies.line",
            )
        return sample(line)

    return encode


def needed(package: str, extra: str) -> None:
    """Refuse to go on without a package, and say which extra of this one brings it."""
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"This study must find the package {package}. Found none: call "
            f"`{Path(sys.executable)} -m pip install {package}`, or install "
            f"'trak-core[{extra}]', which has all that such studies need.",
            code="studies.package",
        )


def function_at(place: str, argument: str) -> Callable[..., Any]:
    """Return the function that ``file.py:function`` names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        problem = f"no file {file} in {Path.cwd()}" if path.suffix == ".py" else place
        raise InputError(
            f"study_arguments: {argument} must name a function as file.py:function. Found "
            f"{problem}.",
            code="studies.function",
        )
    function = getattr(Study.load(path).module, name, None)
    if not callable(function):
        raise InputError(
            f"study_arguments: {argument} must name a function of {file}. Found no {name} there.",
            code="studies.function",
        )
    return function
