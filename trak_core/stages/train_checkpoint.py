"""Train a model with the study's ``train``, and save its checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trak_core.runtime.files import atomic_write
from trak_core.study.study import Study, models_along, trained_model


def train_checkpoint(
    *,
    checkpoints: Sequence[Path],
    study_file: Path,
    arguments: dict[str, Any],
    times: list[float] | None,
    threads: int,
) -> None:
    """Call the study's ``train``, and save the model's state dict at the end or at ``times``.

    ``arguments`` are passed to ``train`` by name. ``times`` are ascending. ``train`` must return or
    yield models with finite parameters. With one thread, repeated calls on one machine give
    bitwise equal weights if ``train`` is deterministic.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    if times is None:
        models = iter([trained_model(study, arguments)])
    else:
        models = models_along(study, arguments, times)
    for checkpoint, model in zip(checkpoints, models, strict=True):
        # If torch received the path, it would store the random name of the temporary file.
        with atomic_write(checkpoint) as partial, partial.open("wb") as file:
            torch.save(model.state_dict(), file)
