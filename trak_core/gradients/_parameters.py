"""Which parameters to differentiate."""

import fnmatch
import math
from collections.abc import Sequence

from torch import nn

from trak_core.errors import InputError


def select_parameters(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, in ``named_parameters`` order.

    A pattern means the parameters with ``requires_grad`` that it matches. Only where it matches
    none of them it means frozen ones: ``*lora_*`` finds an adapter that was loaded for inference,
    and ``*layers.0.*``, where only adapters are trained, that layer's adapter alone.

    Args:
        model: Of frozen parameters, those that are returned have ``requires_grad`` from then on.
        patterns: Shell-style patterns (``layer4.*``) of full parameter names; None takes all that
            have ``requires_grad``.

    Returns:
        Names to parameters, at least one.

    Raises:
        InputError: If a pattern matches no parameter, or one that holds no floating-point numbers;
            or if nothing is left to differentiate.
    """
    named = dict(model.named_parameters())
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    if patterns is None:
        if not trainable:
            raise InputError(
                f"The model must have a parameter with requires_grad. Found none of {len(named)}. "
                "Name in the config's `parameters` those to differentiate, frozen or not, such as "
                '["*lora_*"]; or don\'t freeze them in make_model().',
                code="gradients.no_parameter",
            )
        chosen = set(trainable)
    else:
        chosen = {name for pattern in patterns for name in _matches(pattern, trainable, named)}
    selected = {name: parameter for name, parameter in named.items() if name in chosen}
    integers = [f"{n} {p.dtype}" for n, p in selected.items() if not _has_gradient(p)]
    if integers:
        raise InputError(
            "Parameters that are differentiated must hold floating-point numbers. Found "
            f"{', '.join(integers[:8])}, as quantized weights are. Choose `parameters` that leave "
            "them out, or load the model without quantization.",
            code="gradients.integer_parameter",
        )
    for parameter in selected.values():
        parameter.requires_grad_(True)
    return selected


def _matches(pattern: str, trainable: list[str], named: dict[str, nn.Parameter]) -> list[str]:
    for names in (trainable, list(named)):
        if found := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return found
    shown = list(named)[:8] + (["..."] if len(named) > 8 else [])
    raise InputError(
        "Every pattern under `parameters` must match the name of a parameter. Found "
        f"{pattern!r}, which matches none of {', '.join(shown) or 'no parameters'}.",
        code="gradients.unmatched_pattern",
    )


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return p, the number of entries of the parameters."""
    return sum(math.prod(p.shape) for p in parameters.values())
