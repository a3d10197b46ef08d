"""Call the study's ``train`` and check the models that it makes, at its end or along its way."""

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
    study: Study,
    arguments: dict[str, Any],
    data: Samples | None = None,
    sample_weights: torch.Tensor | None = None,
) -> nn.Module:
    """Return the model that the study's ``train`` returns or yields last, with finite weights.

    It gets ``arguments`` by name, the samples ``data``, and ``sample_weights``, float32, of shape
    (n,): what each sample's loss is multiplied by. None, for all of them and for 1, isn't passed.
    """
    last = deque(_steps(study, arguments, data, sample_weights), maxlen=1)
    return _checked(study, arguments, last[0][1] if last else None)


def models_along(
    study: Study, arguments: dict[str, Any], times: list[float], data: Samples | None = None
) -> Generator[tuple[float, nn.Module]]:
    """Train until the last of the times, and yield each with the model; it is the same, trained on.

    The ``times`` ascend; ``arguments`` and ``data`` are as in ``trained_model``. A generator
    ``train`` must yield (time, model) at every one of them, with finite weights.

    Yields:
        The time, and the model there.
    """
    remaining = list(times)
    passed: list[str] = []
    with closing(_steps(study, arguments, data)) as steps:
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
    data: Samples | None,
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
                f"{study.path}: train({arguments}) must have finite weights. Found NaN or "
                f"infinity in {name}: training diverged."
            )
    return model
