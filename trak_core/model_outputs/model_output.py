"""ModelOutput: the number f that is explained, and its loss weight, as functions of a result."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trak_core.errors import InputError, came_from_no_memory

# The label of tokens and pixels that don't count, as in torch's cross entropy.
IGNORED = -100


def whole(returned: object) -> Any:
    """Return what a model returned as it is."""
    return returned


def _mean_number(label: Tensor) -> Tensor:
    """Return a label of one number as it is; the mean of several, without NaN."""
    if label.numel() != 1:
        return label.float().nanmean().nan_to_num()
    number = label.reshape(())
    return number.long() if number.dtype is torch.bool else number


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model output f with its loss weight, as functions of what the model returned for a sample.

    What was returned is what ``read`` took out of it, without the batch dimension: a tensor, or a
    tuple, list, dict or transformers' object of tensors, each with a row a sample. A tensor of one
    number is the same for all samples. Every function returns a scalar, in float32 or better, and
    is safe under ``torch.func.vmap``. Only f must be given.

    Attributes:
        value: f of what was returned and the label.
        loss_weight: Q = -dl/df, l the training loss. If not given, 1, which is right for f = -l.
        curvature: W = d2l/df2; None where the loss is not a function of f alone.
        prediction: What the model predicts, in the units of ``label_number``; None for f itself. An
            integer is a class: tables have the commonest over checkpoints, and the mean of others.
        label_number: The label as one number, for tables: itself, or how many of its parts count.
            If not given, the mean of a label of several numbers.
        read: What counts in what the model returned for a batch; all, if not given.
        has_labels: Whether samples have a label; if not, functions get 1 in its place.
        label_ndim: Dimensions of a label: 0 for a number, 1 for tokens, 2 for pixels; None for a
            label of any shape, the same for all samples.
        n_classes: How many labels exist; None if labels are no classes.
        predicts_next: Whether what the model returns at one token predicts the label of the next.
        takes_labels: Whether the model is called with the labels too, as ``labels``: an
            encoder-decoder makes its decoder's inputs of them.
        loss_hessian: The Hessian of l in what was returned, one tensor, times a vector of its
            shape, given last; None where it isn't known.
        joins_tokens: Whether f is a function of the log-odds of tokens, in the way of
            ``trak_core.model_outputs.language_modelling``: logits may be computed in pieces then.

    Example:
        The squared length of what the model returns, for samples without labels:

        >>> import torch
        >>> from trak_core.model_outputs.model_output import ModelOutput
        >>> output = ModelOutput(value=lambda x, label: x.square().sum(), has_labels=False)
        >>> output.value(torch.tensor([3.0, 4.0]), torch.tensor(1)).item()
        25.0
    """

    value: Callable[[Any, Tensor], Tensor]
    loss_weight: Callable[[Any, Tensor], Tensor] = lambda _, y: torch.ones((), device=y.device)
    curvature: Callable[[Any, Tensor], Tensor] | None = None
    prediction: Callable[[Any, Tensor], Tensor] | None = None
    label_number: Callable[[Tensor], Tensor] = _mean_number
    read: Callable[[object], Any] = whole
    has_labels: bool = True
    label_ndim: int | None = None
    n_classes: Callable[[Any], int | None] = lambda _: None
    predicts_next: bool = False
    takes_labels: bool = False
    loss_hessian: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    joins_tokens: bool = False


def _has_rows(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def rows_in(returned: Any, n_samples: int) -> list[Tensor]:
    """Return the tensors with a row a sample in what was read: one at least, and all but numbers.

    Others are refused: a constant with as many rows as a batch by chance would be cut up.
    """
    rows = [leaf for leaf in pytree.tree_leaves(returned) if _has_rows(leaf)]
    odd = [leaf for leaf in rows if len(leaf) != n_samples]
    if odd or not rows:
        odd_rows = f"{len(odd[0])} rows" if odd else "none"
        raise InputError(
            f"The model must return one row a sample. Found {odd_rows} for a batch of {n_samples}.",
            code="gradients.model_rows",
        )
    return rows


def of_sample(returned: Any, i: int, n_samples: int) -> Any:
    """Return what was read of sample ``i`` in a batch."""

    def row(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        # A view: no copy of the gradient of a text's logits, which is large.
        return leaf.squeeze(0) if n_samples == 1 else leaf[i]

    return row(returned) if isinstance(returned, Tensor) else pytree.tree_map(row, returned)


def over_samples(function: Callable[..., Any], returned: Any, labels: Tensor) -> Any:
    """Return a function of a model output for each sample of a batch, by ``torch.vmap``."""
    n_samples = len(labels)
    rows_in(returned, n_samples)
    if isinstance(returned, Tensor):
        return torch.vmap(function)(returned, labels)
    dims = pytree.tree_map(lambda leaf: 0 if _has_rows(leaf) else None, returned)
    return torch.vmap(function, in_dims=(dims, 0))(returned, labels)


def random_output(symptom: str) -> InputError:
    """Return the refusal of a model output that draws random numbers."""
    return InputError(
        "A model output must be the same number whenever it is computed, and draw nothing at "
        f"random. Found {symptom}. Draw noise, timesteps or masks in the study, each sample's its "
        "own: `torch.Generator().manual_seed(i)` for sample i. Give them as inputs, or as part of "
        "the label.",
        code="model_outputs.random",
    )


def detached(returned: Any) -> Any:
    """Return what was read without its graph."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, returned)


@dataclass(frozen=True, slots=True)
class OfValue:
    """A function of f alone, as a function of outputs and label, for a ``ModelOutput``.

    Where f of a sample is known already, it is not computed again. ``value`` is f of outputs and
    label, ``function`` what this is of f, such as Q.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    function: Callable[[Tensor], Tensor]

    def __call__(self, outputs: Tensor, label: Tensor) -> Tensor:
        """Return ``function`` of f."""
        return self.function(self.value(outputs, label))


def read_logits(returned: object) -> Tensor:
    """Return the tensor that counts in what a model returned.

    That is the tensor itself; an object with ``logits`` (transformers); a mapping with ``logits``
    or ``out`` (torchvision's segmentation); or a sequence that starts with it. All else is refused.
    """
    logits = returned
    if isinstance(returned, Mapping):
        logits = returned.get("logits", returned.get("out"))
    elif isinstance(returned, Sequence) and returned:
        logits = returned[0]
    elif not isinstance(returned, Tensor):
        logits = getattr(returned, "logits", None)
    if not isinstance(logits, Tensor):
        keys = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
        raise InputError(
            "The model must return a tensor, an object with `logits`, a dict with `logits` or "
            f"`out`, or a tuple that starts with the tensor. Found {type(returned).__name__}"
            f"{keys}.",
            code="model_outputs.returned",
        )
    return logits


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor whose dtype is float32 or float64: half precision cannot hold log-odds."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def own_output(made: object, name: str) -> ModelOutput:
    """Return the model output that a user made, whose mistakes are explained.

    It is a ``ModelOutput``; or f alone, a function of what the model returned for one sample and of
    its label. A function of one argument means that samples have no label. Messages call it
    ``name``.
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
            tensor = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else None
            )
            raise InputError(
                f"{name} must be one number, a tensor without dimensions. Found "
                f"{tensor or type(value).__name__}. `.sum()`, `.mean()` or `.squeeze()` makes a "
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
