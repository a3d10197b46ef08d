"""What a model says of many samples: model outputs and predictions, without gradients."""

import numpy as np
import torch
from torch import nn
from torch.func import vmap

from trak_core.gradients import as_batch, call, check_labels, count_classes, in_evaluation_mode
from trak_core.models.named_output import model_output
from trak_core.study.study import Split


def explained(
    model: nn.Module, output_name: str, train: Split, pool: Split, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return f and prediction of every sample of the pool under one model."""
    device = next(model.parameters()).device
    output = model_output(output_name, model, train, device)
    n_classes = count_classes(model, output, pool.batch(0, 1), device)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.no_grad(), in_evaluation_mode(model):
        for start in range(0, len(pool.ids), batch_size):
            stop = min(start + batch_size, len(pool.ids))
            batch = as_batch(pool.batch(start, stop), output).mapped(lambda t: t.to(device))
            check_labels(batch.labels, output, n_classes, pool.ids[start:stop])
            outputs = output.read(call(model, batch))
            values = vmap(output.value)(outputs, batch.labels)
            predictions = vmap(output.prediction)(outputs, batch.labels)
            found.append((values.cpu().numpy(), predictions.cpu().numpy()))
    values, predictions = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return values, predictions
