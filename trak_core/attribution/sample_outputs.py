"""Find model outputs by name, and compute outputs, predictions and embeddings of samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.artifacts import Writer
from trak_core.attribution.batch_by_length import order_samples
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    as_batch,
    call,
    check_labels,
    count_classes,
    in_chunks,
    in_evaluation_mode,
)
from trak_core.model_outputs.about_outputs import TABLE, about_output, function_location
from trak_core.model_outputs.clip import drawn_pairs, read_embeddings
from trak_core.model_outputs.language_modelling import warn_of_masked_model
from trak_core.model_outputs.model_output import ModelOutput, over_samples, own_output
from trak_core.model_outputs.supervised import LOSS
from trak_core.runtime.progress import print_line
from trak_core.settings import POOL, TRAIN, FeaturesSpec
from trak_core.study.dataset_split import Split
from trak_core.study.study import Study

# The number of pairs with which CLIP's model output compares a pair, as in the TRAK paper, and the
# seed with which these pairs are drawn.
N_OTHERS = 300
OTHERS_SEED = 0


def _object_in(file: str, name: str, study: Study | None) -> object:
    """Return the object called ``name`` in a Python file, which may be the study's file."""
    path = Path(file)
    if study is None or path.resolve() != study.path.resolve():
        study = Study.load(path)
    module = study.module
    if not hasattr(module, name):
        names = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == path.stem]
        raise InputError(
            f"model_output must name a function or a ModelOutput in {file}. The file has no "
            f"{name}. It defines {', '.join(names) or 'nothing'}.",
            code="model_outputs.no_function",
        )
    return getattr(module, name)


def _scale(model: nn.Module) -> float:
    """Return exp(logit_scale), the factor by which a CLIP model multiplies similarities."""
    scales = [p for name, p in model.named_parameters() if name.split(".")[-1] == "logit_scale"]
    if len(scales) != 1 or scales[0].numel() != 1:
        raise InputError(
            "`model_output: clip` needs a model with one parameter `logit_scale`. This parameter "
            "must be a single number, the logarithm of the factor by which the model multiplies "
            f"similarities. Found {len(scales)} parameters of this name.",
            code="attribution.logit_scale",
        )
    return scales[0].detach().exp().item()


def model_output(
    name: str,
    model: nn.Module,
    pairs: Split | None,
    device: torch.device,
    study: Study | None = None,
    n_others: int = N_OTHERS,
) -> ModelOutput:
    """Return the model output for a name in ``TABLE``, or for ``file.py:object``.

    A model output with ``needs_pairs`` compares a pair of an image and a text with ``n_others``
    other pairs. These are drawn uniformly from the training samples ``pairs``, and are the same for
    every checkpoint. ``model`` computes their embeddings, and must have a parameter
    ``logit_scale``.
    """
    place = function_location(name)
    if place is not None:
        return own_output(_object_in(*place, study), name)
    about = TABLE[name]
    if not about.needs_pairs:
        output = about.load()
        warn_of_masked_model(output, model)
        return output
    assert pairs is not None
    embeddings: list[Tensor] = []
    with torch.no_grad(), in_evaluation_mode(model):
        for i in drawn_pairs(len(pairs.ids), n_others, OTHERS_SEED):
            pair = as_batch(pairs.batch(i, i + 1), LOSS)  # LOSS reads no labels.
            returned = call(model, pair.mapped(lambda tensor: tensor.to(device)))
            embeddings.append(read_embeddings(returned)[0])
    images, texts = torch.stack(embeddings, dim=1)
    return about.load(images, texts, _scale(model))


def outputs_and_predictions(
    model: nn.Module,
    output_name: str,
    train: Split,
    pool: Split,
    batch_size: int,
    study: Study | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the model outputs and predictions of the n samples in ``pool``, shape (n,) each."""
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
    """Return embeddings: the inputs of the last ``torch.nn.Linear`` that a forward pass calls.

    Inputs are averaged over all dimensions between the first and the last, such as the tokens of a
    text without padding. The result has shape (batch, width), float32.
    """
    last_inputs: list[Tensor] = []

    def store(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        last_inputs[:] = [inputs[0].detach()]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(store) for layer in layers]
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
        layer = f"inputs of shape {tuple(shape)}" if last_inputs else "no such layer"
        raise InputError(
            "Embeddings are the inputs of the last torch.nn.Linear, which must have a row for each "
            f"sample or token. Found {layer} for {len(batch)} samples. Remove embedding_cosine "
            "from the baselines of `evaluation`.",
            code="attribution.embeddings",
        )
    rows = last_inputs[0].float()
    if lengths is not None and rows.ndim > 2:
        counts = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return (rows * counts[..., None]).sum(dim=1) / lengths[:, None]
    return rows.reshape(len(rows), -1, rows.shape[-1]).mean(dim=1)


def write_columns(
    writer: Writer, ids: Sequence[object], columns: Sequence[Tensor], spec: FeaturesSpec
) -> None:
    """Write the ids of samples, and ``columns``: labels, outputs, predictions and loss weights.

    The last column may be the curvature. The loss weights and curvatures of targets are not
    written.
    """
    labels, outputs, predictions, weights, *curvature = (column.cpu() for column in columns)
    writer.vector("sample_ids", list(ids))
    writer.vector("labels", labels.numpy())
    writer.vector("outputs", outputs.float().numpy())
    writer.vector("predictions", predictions.numpy())
    if spec.split in {None, TRAIN, POOL}:
        warn_of_saturation(weights, spec.model_output)
        writer.vector("loss_weights", weights.float().numpy())
        for column in curvature:
            writer.vector("curvature", column.float().numpy())


def warn_of_saturation(loss_weights: Tensor, model_output: str) -> None:
    """Warn if most training samples have loss weights, and therefore scores, near 0."""
    if not about_output(model_output).weight_is_probability:
        return
    saturated = (loss_weights.abs() < 1e-3).float().mean().item()
    if saturated > 0.5:
        print_line(
            f"Warning: {saturated:.0%} of the training samples have a loss weight below 1e-3, and "
            "therefore scores near 0, because the model fits them almost exactly. To rank them "
            "better, set a smaller loss_weight_power, or use an earlier checkpoint."
        )
