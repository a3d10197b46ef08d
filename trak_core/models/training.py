"""A model that the study's own ``train`` made."""

from typing import Any

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.study.study import Samples, Study, users_code


def trained_model(
    study: Study, arguments: dict[str, Any], data: Samples | None = None
) -> nn.Module:
    """Call the study's ``train`` and make sure of what it returns.

    Args:
        study: With a function ``train``.
        arguments: Passed to it by name.
        data: Passed as ``data``, the samples to train on; None, for all of them, isn't passed.

    Returns:
        The trained model.

    Raises:
        InputError: If ``train`` returns no model, or one with parameters that are not finite.
    """
    given = {} if data is None else {"data": data}
    train = study.function("train")
    with users_code(f"{study.path}: train({arguments})"):
        model = train(**arguments, **given)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{study.path}: train() must return the trained torch.nn.Module. Found "
            f"{type(model).__name__}."
        )
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise InputError(
                f"{study.path}: train({arguments}) must end with finite weights. Found NaN or "
                f"infinity in {name}: training diverged."
            )
    return model
