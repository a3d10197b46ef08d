"""Train one checkpoint with the study's own training function."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.study.flipped import relabelled
from trak_core.study.study import TRAIN, Samples, Study, users_code
from trak_core.system.whole_file import written_whole


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


def train_checkpoint(
    *,
    checkpoint: Path,
    study: Path,
    arguments: dict[str, Any],
    threads: int,
    mislabelled: dict[str, Any] | None = None,
) -> None:
    """Call the study's ``train`` and keep the state dict it ends with.

    Args:
        checkpoint: The file to write, whole or not at all.
        study: The study's Python file.
        arguments: Passed to ``train`` by name.
        threads: For torch; 1 makes training repeatable to the bit on one machine.
        mislabelled: Train with some labels flipped: ``fraction`` and ``seed`` of the draw.

    Raises:
        InputError: If ``train`` doesn't return a model, or one with parameters that are not finite.
    """
    torch.set_num_threads(threads)
    loaded = Study.load(study)
    data = None if mislabelled is None else relabelled(loaded.split(TRAIN, None), **mislabelled)
    model = trained_model(loaded, arguments, None if data is None else data.samples)
    # By an open file: given a path, torch writes the file's name, here a process id, into it.
    with written_whole(checkpoint) as partial, partial.open("wb") as file:
        torch.save(model.state_dict(), file)
