"""Train one checkpoint with the study's own training function."""

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.study import Study


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
    model = loaded.function("train")(**arguments)
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
    partial = checkpoint.with_name(f".{checkpoint.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(checkpoint)
    finally:
        partial.unlink(missing_ok=True)
