"""Models that the study's own ``train`` makes: the one it ends with, or those along its way."""

import inspect
from collections import deque
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.study.split import Samples, users_code
from trak_core.study.study import Study


def trained_model(
    study: Study, arguments: dict[str, Any], data: Samples | None = None
) -> nn.Module:
    """Call the study's ``train`` and make sure of the model it ends with.

    Args:
        study: With a function ``train``, which returns it or yields it last.
        arguments: Passed to it by name.
        data: Passed as ``data``, the samples to train on; None, for all of them, isn't passed.

    Returns:
        The trained model.

    Raises:
        InputError: If ``train`` returns no model, or one with parameters that are not finite.
    """
    last = deque(_steps(study, arguments, data), maxlen=1)
    return _checked(study, arguments, last[0][1] if last else None)


def models_along(
    study: Study, arguments: dict[str, Any], times: list[float], data: Samples | None = None
) -> Generator[tuple[float, nn.Module]]:
    """Train, and yield the model at each of the times, in order; it is the same, trained on.

    After the last time training is left off.

    Args:
        study: With a generator ``train`` that yields (time, model).
        arguments: Passed to it by name.
        times: Ascending.
        data: See ``trained_model``.

    Yields:
        The time, and the model there.

    Raises:
        InputError: If ``train`` passes a time without yielding it, or yields no model, or one with
            parameters that are not finite.
    """
    asked = list(times)
    seen: list[float] = []
    with closing(_steps(study, arguments, data)) as steps:
        for at, model in steps:
            seen.append(at)
            if at == asked[0]:
                yield asked.pop(0), _checked(study, arguments, model)
            if not asked:
                return
            if at > asked[0]:
                break
    shown = [repr(at) for at in seen]
    if len(shown) > 12:
        shown[6:-3] = ["..."]
    yielded = ", ".join(shown)
    raise InputError(
        f"{study.path}: train({arguments}) must yield (time, model) at each time that `at` asks "
        f"for. Found none at {asked[0]!r}; it yielded at {yielded or 'none'}."
    )


def _steps(
    study: Study, arguments: dict[str, Any], data: Samples | None
) -> Generator[tuple[float, Any]]:
    """Yield what ``train`` yields, or the model it returns."""
    given = {} if data is None else {"data": data}
    train = study.function("train")
    what = f"{study.path}: train({arguments})"
    with users_code(what):
        made = train(**arguments, **given)
    if not inspect.isgenerator(made):
        yield 0.0, made
        return
    with closing(made):
        while True:
            with users_code(what):
                step = next(made, None)
            if step is None:
                return
            yield _time_and_model(study, step)


def _time_and_model(study: Study, step: Any) -> tuple[float, nn.Module]:
    is_pair = isinstance(step, tuple) and len(step) == 2
    if not is_pair or isinstance(step[0], bool) or not isinstance(step[0], int | float):
        found = ", ".join(type(one).__name__ for one in step) if is_pair else type(step).__name__
        raise InputError(
            f"{study.path}: train() must yield a number, the time in the run, and the model. Found "
            f"{found}."
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
                f"{study.path}: train({arguments}) must have finite weights. Found NaN or "
                f"infinity in {name}: training diverged."
            )
    return model
