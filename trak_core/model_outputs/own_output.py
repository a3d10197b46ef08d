"""Make a model output of what a user wrote: a function of what the model returned, or several."""

import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trak_core.errors import InputError, came_from_no_memory
from trak_core.model_outputs.model_output import ModelOutput, at_least_float32, random_output


def own_output(made: object, name: str) -> ModelOutput:
    """Return the model output that a user made, whose mistakes are explained.

    Args:
        made: A ``ModelOutput``; or f alone, a function of what the model returned for one sample
            and of its label. A function of one argument means that samples have no label.
        name: What messages call it.
    """
    if isinstance(made, ModelOutput):
        output = made
    elif callable(made) and not isinstance(made, type):
        output = _of_function(made, name)
    else:
        raise InputError(
            f"{name} must be a function of what the model returned for a sample and of its label, "
            f"`def f(returned, label)`, or a ModelOutput. Found {_kind(made)}.",
            code="model_outputs.own",
        )
    curvature, prediction = output.curvature, output.prediction
    return replace(
        output,
        value=_checked(output.value, name),
        loss_weight=_checked(output.loss_weight, f"the loss weight of {name}"),
        curvature=curvature and _checked(curvature, f"the curvature of {name}"),
        prediction=(
            prediction and _checked(prediction, f"the prediction of {name}", keeps_integers=True)
        ),
        # Logits in pieces would give the joint log-odds, whatever the user's f is.
        joins_tokens=False,
    )


def _of_function(function: Callable[..., Any], name: str) -> ModelOutput:
    try:
        signature = inspect.signature(function)
    except ValueError:  # built into Python or torch
        signature = None
    parameters = [] if signature is None else [*signature.parameters.values()]
    by_keyword = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    given = [p for p in parameters if p.default is p.empty and p.kind not in by_keyword]
    # A label that may be left out would say neither.
    is_clear = all(p.name != "label" or p in given for p in parameters)
    if is_clear and (any(p.kind is p.VAR_POSITIONAL for p in given) or len(given) == 2):
        return ModelOutput(value=function)
    if is_clear and len(given) == 1:
        return ModelOutput(value=lambda returned, label: function(returned), has_labels=False)
    raise InputError(
        f"{name} must take what the model returned for a sample and the sample's label, "
        f"`(returned, label)`, or `(returned)` where samples have no label. Found "
        f"{signature or 'a function that does not say its arguments'}.",
        code="model_outputs.arguments",
    )


def _kind(made: object) -> str:
    return f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__


def _checked(
    function: Callable[[Any, Tensor], Tensor], name: str, *, keeps_integers: bool = False
) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that refuses all but one number, and explains what fails.

    Numbers are float32 or better; a class, where integers are kept, is int64.
    """

    def number(returned: Any, label: Tensor) -> Tensor:
        try:
            value = function(returned, label)
        except InputError:
            raise
        except Exception as error:
            if came_from_no_memory(error):
                raise
            raise _explained(error, name) from error
        if not isinstance(value, Tensor) or value.ndim:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
            raise InputError(
                f"{name} must be one number, a tensor without dimensions. Found "
                f"{found or type(value).__name__}. `.sum()`, `.mean()` or `.squeeze()` makes a "
                "number of a tensor.",
                code="model_outputs.number",
            )
        is_whole = not (value.is_floating_point() or value.is_complex())
        if keeps_integers and is_whole and value.dtype is not torch.bool:
            return value.long()
        return at_least_float32(value)

    return number


def _explained(error: Exception, name: str) -> InputError:
    said = (str(error).splitlines() or [""])[0]
    frame = traceback.extract_tb(error.__traceback__)[1:]
    own = [f for f in frame if "/torch/" not in f.filename] or frame
    where = f" in {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    if "randomness" in str(error):
        return random_output(f"a random call{where}")
    if isinstance(error, RuntimeError) and "vmap" in str(error):
        return InputError(
            f"{name} must work for all samples of a batch at a time, by torch.vmap. Found what it "
            f"can't do{where}. Take `torch.where` in place of `if`, and no `.item()` or `float()`.",
            code="model_outputs.vmap",
        )
    return InputError(
        f"{name} must compute a number of one sample, without its batch dimension. Found "
        f"{type(error).__name__}: {said}{where}.",
        code="model_outputs.failed",
    )
