"""Train one checkpoint with the study's own training function."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.study import Study, users_code
from trak_core.whole_file import written_whole


def train_checkpoint(
    *, checkpoint: Path, study: Path, arguments: dict[str, Any], threads: int
) -> None:
    """Call the study's ``train`` and keep the state dict it ends with.

    Args:
        checkpoint: The file to write, whole or not at all.
        study: The study's Python file.
        arguments: Passed to ``train`` by name.
        threads: For torch; 1 makes training repeatable to the bit on one machine.

    Raises:
        InputError: If ``train`` doesn't take these arguments, returns no model, or if the model
            has parameters that are not finite.
    """
    torch.set_num_threads(threads)
    loaded = Study.load(study)
    train = loaded.function("train")
    with users_code(f"{study}: train({arguments})"):
        model = train(**arguments)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{study}: train() must return the trained torch.nn.Module. Found "
            f"{type(model).__name__}."
        )
    for name, value in model.state_dict().items():
        if not torch.isfinite(value).all():
            raise InputError(
                f"{study}: train({arguments}) must end with finite weights. Found NaN or infinity "
                f"in {name}: training diverged."
            )
    # By an open file: given a path, torch writes the file's name, here a process id, into it.
    with written_whole(checkpoint) as partial, partial.open("wb") as file:
        torch.save(model.state_dict(), file)
