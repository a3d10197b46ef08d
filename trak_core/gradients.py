"""Per-sample gradients of a model output, as blocks of one parameter each.

The layout of the whole project is fixed here: a gradient has one coordinate a parameter entry, the
parameters in ``named_parameters`` order, each row-major; n samples give an (n, p) matrix whose
columns come as blocks, so that nothing is ever concatenated.
"""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from trak_core.errors import InputError
from trak_core.model_outputs import ModelOutput


@dataclass(frozen=True, slots=True)
class PerSample:
    """What one batch gives under one checkpoint.

    Attributes:
        gradients: df/dtheta, one (batch, *shape) tensor a parameter, in order.
        outputs: f, shape (batch,).
        predictions: Shape (batch,).
        loss_weights: Q, shape (batch,).
        curvature: W, shape (batch,); None where the output has none.
    """

    gradients: dict[str, Tensor]
    outputs: Tensor
    predictions: Tensor
    loss_weights: Tensor
    curvature: Tensor | None


def select_parameters(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, in ``named_parameters`` order.

    Args:
        model: Its parameters with ``requires_grad=False`` are left out.
        patterns: Shell-style patterns (``layer4.*``) of full parameter names; None takes all.

    Returns:
        Names to parameters, at least one.

    Raises:
        InputError: If a pattern matches no parameter, or if nothing is left to differentiate.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if patterns is None:
        selected = trainable
    else:
        for pattern in patterns:
            if not fnmatch.filter(trainable, pattern):
                raise InputError(
                    "Every pattern under `parameters` must match the name of a parameter with "
                    f"requires_grad. Found {pattern!r}, which matches none of "
                    f"{', '.join(trainable) or 'no parameters'}."
                )
        selected = {
            name: p
            for name, p in trainable.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        }
    if not selected:
        raise InputError("The model must have a parameter with requires_grad. Found none.")
    return selected


def per_sample_gradients(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    batch: Sequence[Tensor],
) -> PerSample:
    """Differentiate f of each sample of a batch with respect to ``parameters`` alone.

    The numbers of a sample don't depend on the other samples of its batch, to rounding.

    Args:
        model: In evaluation mode, on the batch's device. Unchanged.
        parameters: From ``select_parameters``.
        output: The model output f.
        batch: The model's positional arguments and, last, the labels; first dimension = sample.

    Returns:
        Gradients, outputs and predictions of the batch, on its device.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    trained = {name: p.detach() for name, p in parameters.items()}
    fixed = {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name not in trained
    }

    def value(trained: dict[str, Tensor], *sample: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        *inputs, label = sample
        arguments = tuple(tensor.unsqueeze(0) for tensor in inputs)
        outputs = output.read(functional_call(model, (trained, fixed), arguments)).squeeze(0)
        f, detached = output.value(outputs, label), outputs.detach()
        others = [output.prediction, output.loss_weight]
        if output.curvature is not None:
            others.append(output.curvature)
        return f, (f.detach(), *(function(detached, label) for function in others))

    in_dims = (None, *(0 for _ in batch))
    # Fused attention has no vmap rule; the plain one gives the same function.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients, found = vmap(grad(value, has_aux=True), in_dims)(trained, *batch)
    return PerSample(gradients, *found, *([None] if output.curvature is None else []))


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return p, the number of entries of the parameters."""
    return sum(math.prod(p.shape) for p in parameters.values())


def check_finite(result: PerSample, sample_ids: Sequence[object]) -> None:
    """Stop at NaN or infinity.

    Args:
        result: What a batch gave.
        sample_ids: The batch's ids, for the message.

    Raises:
        InputError: Naming the samples and the parameters.
    """
    bad = ~torch.isfinite(result.outputs)
    names = ["the model output itself"] if bad.any() else []
    for name, block in result.gradients.items():
        bad_rows = ~torch.isfinite(block.flatten(1)).all(dim=1)
        if bad_rows.any():
            names.append(name)
            bad = bad | bad_rows
    if names:
        found = [sample_ids[i] for i in bad.nonzero().flatten().tolist()]
        raise InputError(
            "Per-sample gradients must be finite. Found NaN or infinity for the samples "
            f"{', '.join(map(str, found[:8]))}{' and more' if len(found) > 8 else ''} in "
            f"{', '.join(names[:8])}{' and more' if len(names) > 8 else ''}. Look for bad values "
            "in these samples and in the checkpoint; an infinite score would hide them."
        )


def count_classes(
    model: nn.Module, output: ModelOutput, batch: Sequence[Tensor], device: torch.device
) -> int | None:
    """Run the model on a batch's first sample and return how many labels it can tell apart.

    Returns:
        The number of classes; None where labels are numbers.

    Raises:
        InputError: If the model cannot take the sample.
    """
    inputs = [tensor[:1].to(device) for tensor in batch[:-1]]
    try:
        with torch.no_grad():
            return output.n_classes(output.read(model(*inputs))[0])
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs) or "no inputs"
        raise InputError(
            "A sample must be a tuple of the model's positional arguments and, last, the label. "
            f"Calling the model with one sample of shapes {shapes} failed: "
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def check_labels(labels: Tensor, n_classes: int | None, sample_ids: Sequence[object]) -> None:
    """Refuse labels that the model cannot have been trained with.

    Args:
        labels: One a sample.
        n_classes: From ``count_classes``.
        sample_ids: The samples' ids, for the message.

    Raises:
        InputError: If a class is not an integer from 0 to n_classes - 1, or a number not finite.
    """
    if labels.ndim != 1:
        raise InputError(
            f"A label must be one number a sample. Found labels of shape {tuple(labels.shape)}."
        )
    if n_classes is None:
        good = torch.isfinite(labels)
        expected = "finite numbers"
    else:
        if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
            raise InputError(
                f"Labels must be integers from 0 to {n_classes - 1}. Found {labels.dtype}."
            )
        good = (labels >= 0) & (labels < n_classes)
        expected = f"integers from 0 to {n_classes - 1}, the classes of the study's model"
    if not good.all():
        i = int((~good).nonzero()[0])
        raise InputError(
            f"Labels must be {expected}. Found {labels[i].item()} in sample {sample_ids[i]}."
        )
