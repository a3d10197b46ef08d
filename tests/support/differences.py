"""Gradients of classifiers by finite differences in float64."""

import torch

from trak_core.model_outputs.supervised import CLASSIFICATION


def by_differences(model, images, labels):
    """Return central differences of f. The model is never called with a single sample."""
    step, pair = 1e-6, torch.cat([images, images])

    def f():
        return CLASSIFICATION.value(model(pair), torch.cat([labels, labels]))[: len(labels)]

    gradients = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = parameter.new_zeros(len(labels), *parameter.shape)
            for i in range(parameter.numel()):
                entry = parameter.view(-1)[i]
                start = entry.clone()
                above, below = (f() for entry[...] in (start + step, start - step))
                entry.copy_(start)
                rows.view(len(labels), -1)[:, i] = (above - below) / (2 * step)
            gradients[name] = rows
    return gradients
