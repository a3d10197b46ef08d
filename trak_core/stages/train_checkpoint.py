"""Train with the study's own training function, and keep what it makes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trak_core.study.study import Study, models_along, trained_model
from trak_core.system.files import written_whole


def train_checkpoint(
    *,
    checkpoints: Sequence[Path],
    study_file: Path,
    arguments: dict[str, Any],
    times: list[float] | None,
    threads: int,
) -> None:
    """Call the study's ``train`` and keep the state dict it ends with, or those along its way.

    ``arguments`` are passed to ``train`` by name. A checkpoint is kept at each of ``times``, which
    ascend, or at the end. Training on 1 thread repeats to the bit on one machine. What ``train``
    gives must be models, one at each time, with finite parameters.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    if times is None:
        models = iter([trained_model(study, arguments)])
    else:
        models = (model for _, model in models_along(study, arguments, times))
    for checkpoint, model in zip(checkpoints, models, strict=True):
        # By an open file: given a path, torch writes the file's name, here a process id, into it.
        with written_whole(checkpoint) as partial, partial.open("wb") as file:
            torch.save(model.state_dict(), file)
