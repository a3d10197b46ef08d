"""What the pipeline knows of samples beside their features: its own model outputs, by name."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.compat.modelout_functions import AbstractModelOutput, ClassificationModelOutput
from trak_core.compat.savers import SAMPLE_COLUMNS
from trak_core.gradients import check_labels, check_samples_apart
from trak_core.model_outputs.table import TABLE


def model_output_of(task: AbstractModelOutput) -> str | None:
    """Return the pipeline's name of a task's model output, None if it has none.

    A subclass may compute anything, and a temperature is nothing that the pipeline knows.
    """
    name = vars(type(task)).get("model_output")
    return name if getattr(task, "loss_temperature", 1) == 1 else None


def check_task(task: AbstractModelOutput, model: nn.Module, batch: Sequence[Tensor]) -> None:
    """Refuse a model that mixes the samples of a batch, where the task is a known one.

    Raises:
        InputError: It names the layer.
    """
    name = model_output_of(task)
    if name is not None:
        assert isinstance(task, ClassificationModelOutput)
        check_samples_apart(model, TABLE[name].load(), task.as_samples(batch))


def describe(task: AbstractModelOutput, model: nn.Module, batch: Sequence[Tensor]) -> np.ndarray:
    """Return what the pipeline keeps of samples beside features, NaN where it has no name for them.

    Args:
        task: The model output.
        model: With the checkpoint's weights.
        batch: Inputs and, last, labels.

    Returns:
        ``SAMPLE_COLUMNS``, shape (B, 4), float64.

    Raises:
        InputError: If a label is not one of the model's.
    """
    name = model_output_of(task)
    if name is None:
        return np.full((len(batch[0]), len(SAMPLE_COLUMNS)), np.nan)
    output, labels = TABLE[name].load(), batch[-1]
    assert isinstance(task, ClassificationModelOutput)
    assert output.curvature is not None
    with torch.no_grad():
        logits = task.get_logits(model, None, None, batch[:-1])
        check_labels(labels, output, logits.shape[-1], range(len(labels)))
        functions = (output.value, output.prediction, output.curvature)
        f, predictions, curvature = (torch.vmap(g)(logits, labels) for g in functions)
        columns = [column.double() for column in (f, labels, predictions, curvature)]
    return torch.stack(columns, dim=1).cpu().numpy()
