"""Train one checkpoint with the study's own training function."""

from pathlib import Path
from typing import Any

import torch

from trak_core.models.training import trained_model
from trak_core.study.flipped import with_flipped_labels
from trak_core.study.study import TRAIN, Study
from trak_core.system.whole_file import written_whole


def train_checkpoint(
    *,
    checkpoint: Path,
    study_file: Path,
    arguments: dict[str, Any],
    threads: int,
    flipped: dict[str, Any] | None = None,
) -> None:
    """Call the study's ``train`` and keep the state dict it ends with.

    Args:
        checkpoint: The file to write, whole or not at all.
        study_file: The study's Python file.
        arguments: Passed to ``train`` by name.
        threads: For torch; 1 makes training repeatable to the bit on one machine.
        flipped: Train with some labels flipped: ``fraction`` and ``seed`` of the draw.

    Raises:
        InputError: If ``train`` doesn't return a model, or one with parameters that are not finite.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    data = None if flipped is None else with_flipped_labels(study.split(TRAIN, None), **flipped)
    model = trained_model(study, arguments, None if data is None else data.samples)
    # By an open file: given a path, torch writes the file's name, here a process id, into it.
    with written_whole(checkpoint) as partial, partial.open("wb") as file:
        torch.save(model.state_dict(), file)
