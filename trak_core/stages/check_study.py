"""Look a study over before any job runs: functions, model, ids, labels, targets.

The result is kept in the study's results folder under a key that covers everything looked at, so
that a second start of Snakemake neither imports torch nor touches the data; training data and
each experiment have keys of their own, so that scoring new targets never asks for training data.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trak_core.errors import InputError
from trak_core.gradients import check_labels, count_classes, n_params, select_parameters
from trak_core.model_outputs import MODEL_OUTPUTS
from trak_core.study import Split, Study

_LABEL_SECONDS = 10.0


def _check_split(split: Split, n_classes: int | None) -> None:
    """Check the labels of as many samples as ten seconds allow; jobs check every one again."""
    began = time.monotonic()
    order = torch.randperm(len(split.ids), generator=torch.Generator().manual_seed(0)).tolist()
    for i in order:
        check_labels(split.batch(i, i + 1)[-1], n_classes, split.ids[i : i + 1])
        if time.monotonic() - began > _LABEL_SECONDS:
            print(f"Labels checked beforehand for a part of {len(split.ids)} samples only.")
            return


def check_study(
    *,
    study: Path,
    model_output: str,
    parameters: Sequence[str] | None,
    trained: bool,
    splits: dict[str, list[int | str] | None],
    shards: dict[str, int],
) -> dict[str, Any]:
    """Build the model, read the data, and compare them with what the config asks for.

    Args:
        study: The study's Python file.
        model_output: Name of the model output.
        parameters: Name patterns, or None.
        trained: Whether checkpoints come from the study's ``train``.
        splits: Splits to look at: None for the training data, ids for an experiment.
        shards: Shards of each split.

    Returns:
        Sizes: n_params, n_classes, and the number of samples of each split.

    Raises:
        InputError: At the first thing that doesn't hold.
    """
    loaded = Study.load(study)
    if trained:
        loaded.function("train")
    model = loaded.make_model().eval()
    output = MODEL_OUTPUTS[model_output]
    sizes: dict[str, Any] = {"n_params": n_params(select_parameters(model, parameters))}
    for name, targets in splits.items():
        where = "train_data()" if targets is None else f"experiment {name}"
        try:
            split = loaded.split(name, targets)
            batch = split.batch(0, 1)
            n_classes = count_classes(model, output, batch, torch.device("cpu"))
            _check_split(split, n_classes)
        except InputError as error:
            raise InputError(f"{study}, {where}: {error}") from error
        if shards[name] > len(split.ids):
            raise InputError(
                f"{where}: shards must not outnumber samples. Found {shards[name]} shards, "
                f"{len(split.ids)} samples."
            )
        sizes[name] = len(split.ids)
    return sizes
