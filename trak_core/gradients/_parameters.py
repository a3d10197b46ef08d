"""Which parameters to differentiate."""

import fnmatch
import math
from collections.abc import Sequence

from torch import nn

from trak_core.errors import InputError


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


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return p, the number of entries of the parameters."""
    return sum(math.prod(p.shape) for p in parameters.values())
