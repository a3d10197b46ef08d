"""The class ``ModelOutput``, and checks that explain errors in user-defined model outputs."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from trak_core.errors import InputError, caused_by_out_of_memory, first_line

# The label of tokens and pixels that don't count, as in torch's cross entropy.
IGNORED = -100


def _mean_number(label: Tensor) -> Tensor:
    """Return a label's number or, if it has several, the mean of those that are not NaN."""
    if label.numel() != 1:
        return label.float().nanmean().nan_to_num()
    number = label.reshape(())
    return number.long() if number.dtype is torch.bool else number


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """A model output f and its loss weight, as functions of the model's return value for a sample.

    ``read`` selects tensors from the model's return value for a batch. It returns a tensor, or a
    tuple, list, dict or transformers object of tensors, with one row for each sample. A tensor
    without dimensions belongs to all samples. The other functions get these tensors for one sample,
    without the batch dimension. They must return a scalar, float32 or float64, and work with
    ``torch.func.vmap``.

    Attributes:
        value: f, as a function of the selected tensors and the label.
        loss_weight: Q = -dl/df for the training loss l. The default 1 is correct for f = -l.
        curvature: W = d2l/df2. None if the loss is not a function of f alone.
        prediction: The model's prediction in the units of ``label_number``. None means f. Tables
            contain the mean over checkpoints or, for integers, the most frequent class.
        label_number: The number that tables contain for a label: the label itself, or the number
            of entries that are not ignored. The default is the mean of the label's entries.
        read: Selects tensors from the model's return value. The default selects everything.
        has_labels: Whether samples have a label. If not, the functions get 1 as the label.
        label_ndim: Number of dimensions of a label: 0 for a number, 1 for tokens, 2 for pixels.
            None allows any shape that is the same for all samples.
        n_classes: The number of classes. None if labels are not classes.
        predicts_next: Whether the logits at a token predict the label of the next token.
        takes_labels: Whether the model is called with ``labels``, from which encoder-decoder models
            compute their decoder's inputs.
        loss_noise: Returns a random vector z with the shape of the selected tensor, mean 0, and
            E[z z^T] equal to the Hessian of l with respect to this tensor. The arguments are the
            tensor, the label, and independent uniform numbers in [0, 1) of the label's shape. None
            if no such function is known.
        joins_tokens: Whether f is the joint log-odds of the tokens, as computed by
            ``language_modelling.labelled_log_odds``. Logits may then be computed in pieces.
    """

    value: Callable[[Any, Tensor], Tensor]
    loss_weight: Callable[[Any, Tensor], Tensor] = lambda _, y: torch.ones((), device=y.device)
    curvature: Callable[[Any, Tensor], Tensor] | None = None
    prediction: Callable[[Any, Tensor], Tensor] | None = None
    label_number: Callable[[Tensor], Tensor] = _mean_number
    read: Callable[[object], Any] = lambda returned: returned
    has_labels: bool = True
    label_ndim: int | None = None
    n_classes: Callable[[Any], int | None] = lambda _: None
    predicts_next: bool = False
    takes_labels: bool = False
    loss_noise: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    joins_tokens: bool = False


def _has_rows(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def rows_in(returned: Any, n_samples: int) -> list[Tensor]:
    """Return all tensors with dimensions, each of which must have one row for each sample."""
    rows = [leaf for leaf in pytree.tree_leaves(returned) if _has_rows(leaf)]
    lengths = [len(leaf) for leaf in rows if len(leaf) != n_samples]
    if lengths or not rows:
        n_rows = f"{lengths[0]} rows" if lengths else "no tensor with rows"
        raise InputError(
            f"The model must return a row for each sample. Found {n_rows} for a batch "
            f"of {n_samples}.",
            code="gradients.model_rows",
        )
    return rows


def of_sample(returned: Any, i: int, n_samples: int) -> Any:
    """Return the tensors of sample ``i`` in a batch, without the batch dimension."""

    def row(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        # In the backward pass, squeeze makes no copy of the gradient, which is large for logits.
        return leaf.squeeze(0) if n_samples == 1 else leaf[i]

    return row(returned) if isinstance(returned, Tensor) else pytree.tree_map(row, returned)


def over_samples(function: Callable[..., Any], returned: Any, labels: Tensor) -> Any:
    """Apply a function of one sample's tensors and label to all samples. Return the results."""
    n_samples = len(labels)
    rows_in(returned, n_samples)
    if isinstance(returned, Tensor):
        return torch.vmap(function)(returned, labels)
    dims = pytree.tree_map(lambda leaf: 0 if _has_rows(leaf) else None, returned)
    return torch.vmap(function, in_dims=(dims, 0))(returned, labels)


def random_output(symptom: str) -> InputError:
    """Return the error for a model output that draws random numbers."""
    return InputError(
        f"A model output must not draw random numbers. Found {symptom}. Draw noise, timesteps or "
        "masks in the study with `torch.Generator().manual_seed(i)` for sample i, and pass them as "
        "inputs or as part of the label.",
        code="model_outputs.random",
    )


def detached(returned: Any) -> Any:
    """Return a model's return value with all tensors detached from autograd's graph."""
    return pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, returned)


@dataclass(frozen=True, slots=True)
class OfValue:
    """A function of the model output f alone, such as a loss weight 1 - p.

    If f is already known, ``function(f)`` can be called without computing f by ``value`` again.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    function: Callable[[Tensor], Tensor]

    def __call__(self, outputs: Tensor, label: Tensor) -> Tensor:
        return self.function(self.value(outputs, label))


def read_logits(returned: object) -> Tensor:
    """Return the logits, or another single tensor, from a model's return value.

    The model must return a tensor, an object with ``logits`` (transformers), a mapping with
    ``logits`` or ``out`` (torchvision), or a sequence that starts with the tensor.
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
    """Return the tensor in float32 or float64, because log-odds need this precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def own_output(made: object, name: str) -> ModelOutput:
    """Return a user-defined model output, with checks that explain errors in its functions.

    ``made`` is a ``ModelOutput`` or a function that returns f. The function takes the model's
    return value for one sample and, if samples have labels, the sample's label.
    """
    if isinstance(made, ModelOutput):
        output = made
    elif callable(made) and not isinstance(made, type):
        output = _of_function(made, name)
    else:
        kind = f"the class {made.__name__}" if isinstance(made, type) else type(made).__name__
        raise InputError(
            f"{name} must be a ModelOutput, or a function `f(returned, label)` of the model's "
            f"return value for a sample and of the sample's label. Found {kind}.",
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
        # Computing logits in pieces would replace the user's f by the joint log-odds of the tokens.
        joins_tokens=False,
    )


def _of_function(function: Callable[..., Any], name: str) -> ModelOutput:
    try:
        signature = inspect.signature(function)
    except ValueError:  # the function is built into Python or torch
        signature = None
    parameters = [] if signature is None else [*signature.parameters.values()]
    by_keyword = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    given = [p for p in parameters if p.default is p.empty and p.kind not in by_keyword]
    # If an argument `label` is optional, it is unclear whether samples have labels.
    is_clear = all(p.name != "label" or p in given for p in parameters)
    if is_clear and (any(p.kind is p.VAR_POSITIONAL for p in given) or len(given) == 2):
        return ModelOutput(value=function)
    if is_clear and len(given) == 1:
        return ModelOutput(value=lambda returned, label: function(returned), has_labels=False)
    raise InputError(
        f"{name} must take two arguments, `(returned, label)`: the model's return value for a "
        "sample and the sample's label. If samples have no label, it must take `(returned)` only. "
        f"Found {signature or 'a function without a signature'}.",
        code="model_outputs.arguments",
    )


def _checked(
    function: Callable[[Any, Tensor], Tensor], name: str, *, keeps_integers: bool = False
) -> Callable[[Any, Tensor], Tensor]:
    """Return a function that calls ``function``, explains errors, and checks the result.

    The result must be one number, which is converted to float32 or float64. If ``keeps_integers``,
    integers are converted to int64 instead.
    """

    def number(returned: Any, label: Tensor) -> Tensor:
        try:
            value = function(returned, label)
        except InputError:
            raise
        except Exception as error:
            if caused_by_out_of_memory(error):
                raise
            raise _explained(error, name) from error
        if not isinstance(value, Tensor) or value.ndim:
            kind = type(value).__name__
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind
            raise InputError(
                f"{name} must be one number, in a tensor without dimensions. Found {kind}. Use "
                "`.sum()`, `.mean()` or `.squeeze()`.",
                code="model_outputs.number",
            )
        is_whole = not (value.is_floating_point() or value.is_complex())
        if keeps_integers and is_whole and value.dtype is not torch.bool:
            return value.long()
        return at_least_float32(value)

    return number


def _explained(error: Exception, name: str) -> InputError:
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if "/torch/" not in frame.filename] or frames
    where = "".join(f" in {f.filename}:{f.lineno}: {f.line}" for f in frames[-1:])
    if "randomness" in str(error):
        return random_output(f"a random call{where}")
    if isinstance(error, RuntimeError) and "vmap" in str(error):
        return InputError(
            f"{name} must work with torch.vmap. Found an unsupported operation{where}. Use "
            "`torch.where` instead of `if`, and no `.item()` or `float()`.",
            code="model_outputs.vmap",
        )
    return InputError(
        f"{name} must compute a number for one sample, without the batch dimension. Found "
        f"{type(error).__name__}: {first_line(error)}{where}.",
        code="model_outputs.failed",
    )
