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
    """Call the study's ``train``, and save the model's state dict at ``times`` or at the end.

    ``arguments`` are passed to ``train`` by name. ``times`` are in ascending order, or None to save
    only at the end. Parameters must be finite. If ``train`` is deterministic and uses one thread,
    repeated calls on one machine give bitwise equal weights.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    if times is None:
        models = iter([trained_model(study, arguments)])
    else:
        models = models_along(study, arguments, times)
    for checkpoint, model in zip(checkpoints, models, strict=True):
        # torch.save stores the name of a path that it is given. A file object avoids this, as the
        # name of the temporary file is random.
        with atomic_write(checkpoint) as partial, partial.open("wb") as file:
            torch.save(model.state_dict(), file)
