"""Compute outputs, predictions and embeddings of samples, and write their columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import Writer
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    call,
    check_labels,
    count_classes,
    in_chunks,
    in_evaluation_mode,
)
from trak_core.model.length_order import order_samples
from trak_core.model.named_output import model_output
from trak_core.model_outputs.model_output import over_samples
from trak_core.model_outputs.table import about_output
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.study.split import Split
from trak_core.study.study import Study


def outputs_and_predictions(
    model: nn.Module,
    output_name: str,
    train: Split,
    pool: Split,
    batch_size: int,
    study: Study | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return f and prediction of every sample of the pool under one model, shape (n,) each."""
    device = next(model.parameters()).device
    output = model_output(output_name, model, train, device, study)
    (samples,) = order_samples([pool], model, output)
    with samples.naming_longest():
        n_classes = count_classes(model, output, samples.batch(0, 1), device)

    def compute(start: int, stop: int) -> list[Tensor]:
        batch = samples.batch(start, stop).mapped(lambda tensor: tensor.to(device))
        check_labels(batch.labels, output, n_classes, samples.split.ids[start:stop])
        outputs = output.read(call(model, batch))
        functions = output.value, output.prediction or output.value
        return [over_samples(f, outputs, batch.labels).cpu() for f in functions]

    with torch.no_grad(), in_evaluation_mode(model):
        blocks = in_chunks(compute, len(samples), samples.batches_of(batch_size))
        pairs = [tensors for *_, tensors in samples.in_order(blocks)]
    values, predictions = (torch.cat(parts).numpy() for parts in zip(*pairs, strict=True))
    return values, predictions


def embed_samples(model: nn.Module, batch: Batch) -> Tensor:
    """Return the inputs of the last ``torch.nn.Linear`` that a forward pass calls.

    Dimensions between the first and the last, such as the tokens of a text, are averaged over,
    without padding. The model is used in evaluation mode, on the batch's device, and left as it
    was. It must call such a layer, with a row a sample.

    Returns:
        Shape (batch, width), float32.
    """
    last_inputs: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        last_inputs[:] = [inputs[0].detach()]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad(), in_evaluation_mode(model):
            call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    lengths = batch.lengths
    shape = last_inputs[0].shape if last_inputs else ()
    fits = len(shape) >= 2 and shape[0] == len(batch)
    if not fits or (lengths is not None and shape[1:-1] not in {(), batch.labels.shape[1:]}):
        layer = f"one with inputs of shape {tuple(shape)}" if last_inputs else "none"
        raise InputError(
            "Embeddings are what enters the last torch.nn.Linear that the model calls, one row a "
            "sample, or a token of texts that differ in length. "
            f"Found {layer} for {len(batch)} samples. Leave embedding_cosine out of "
            "evaluation.baselines."
        )
    rows = last_inputs[0].float()
    if lengths is not None and rows.ndim > 2:
        counts = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return (rows * counts[..., None]).sum(dim=1) / lengths[:, None]
    return rows.reshape(len(rows), -1, rows.shape[-1]).mean(dim=1)


def write_columns(
    writer: Writer, ids: Sequence[object], columns: Sequence[Tensor], spec: FeaturesSpec
) -> None:
    """Write ids, label numbers and ``PerSample.columns``; targets have no loss weights."""
    labels, outputs, predictions, weights, *curvature = (column.cpu() for column in columns)
    writer.vector("sample_ids", list(ids))
    writer.vector("labels", labels.numpy())
    writer.vector("outputs", outputs.float().numpy())
    writer.vector("predictions", predictions.numpy())
    if spec.split in {None, TRAIN}:
        warn_of_saturation(weights, spec.model_output)
        writer.vector("loss_weights", weights.float().numpy())
        for column in curvature:
            writer.vector("curvature", column.float().numpy())


def warn_of_saturation(loss_weights: Tensor, model_output: str) -> None:
    """Warn if most training samples are fitted so well that their scores are near 0."""
    if not about_output(model_output).weight_is_probability:
        return
    saturated = (loss_weights.abs() < 1e-3).float().mean().item()
    if saturated > 0.5:
        print(
            f"Warning: {saturated:.0%} of the training samples have a loss weight below 1e-3: they "
            "are fitted almost exactly and get scores near 0. A smaller loss_weight_power, or an "
            "earlier checkpoint, ranks them better.",
            flush=True,
        )
