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
    """Train a model with the study's ``train``, and save its state dict.

    ``arguments`` are passed to ``train`` by name. A file is saved at each of the ascending
    ``times``, or only at the end if ``times`` is None. It is an error if the weights are not
    finite. If ``train`` is deterministic and uses one thread, repeated calls on the same machine
    give bitwise equal weights.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    if times is None:
        models = iter([trained_model(study, arguments)])
    else:
        models = models_along(study, arguments, times)
    for checkpoint, model in zip(checkpoints, models, strict=True):
        # Given a path, torch.save would store its name in the file, which is the random name of a
        # temporary file. A file object avoids this, so that equal weights give equal files.
        with atomic_write(checkpoint) as partial, partial.open("wb") as file:
            torch.save(model.state_dict(), file)
