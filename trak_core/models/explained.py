"""What a model says of many samples: model outputs and predictions, without gradients."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from trak_core.gradients import call, check_labels, count_classes, in_chunks, in_evaluation_mode
from trak_core.models.arranged import arranged
from trak_core.models.named_output import model_output
from trak_core.study.study import Split


def explained(
    model: nn.Module, output_name: str, train: Split, pool: Split, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return f and prediction of every sample of the pool under one model."""
    device = next(model.parameters()).device
    output = model_output(output_name, model, train, device)
    (samples,) = arranged([pool], model, output)
    with samples.blaming_the_longest():
        first = samples.batch(0, 1).mapped(lambda tensor: tensor.to(device))
        n_classes = count_classes(model, output, first, device)

    def of(start: int, stop: int) -> list[Tensor]:
        batch = samples.batch(start, stop).mapped(lambda tensor: tensor.to(device))
        check_labels(batch.labels, output, n_classes, samples.split.ids[start:stop])
        outputs = output.read(call(model, batch))
        values = vmap(output.value)(outputs, batch.labels)
        return [values.cpu(), vmap(output.prediction)(outputs, batch.labels).cpu()]

    with torch.no_grad(), in_evaluation_mode(model):
        blocks = in_chunks(of, len(samples), samples.batches_of(batch_size))
        found = [tensors for *_, tensors in samples.in_order(blocks)]
    values, predictions = (torch.cat(parts).numpy() for parts in zip(*found, strict=True))
    return values, predictions
