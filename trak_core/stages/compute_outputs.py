"""Compute the model outputs of targets, or the embeddings of all samples, with one checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import vmap

from trak_core.artifacts import EMBEDDINGS, OUTPUTS, create, software
from trak_core.attribution.batch_by_length import OrderedSamples
from trak_core.attribution.device import device_name, find_device
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import embed_samples
from trak_core.gradients import MemoryBudget, budget_bytes, call, in_chunks, in_evaluation_mode
from trak_core.model_outputs.model_output import over_samples
from trak_core.runtime.progress import with_progress
from trak_core.settings import TRAIN, FeaturesSpec
from trak_core.study.study import Study


def compute_outputs(
    *,
    outputs: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    code: str,
    device: str,
    batch_size: int,
    memory_mb: int,
    threads: int,
) -> None:
    """Write the label, model output and prediction of each sample in ``target_data()``.

    Except for rounding, these are the values that a file of features also contains. This stage
    computes no gradients, so its batches can be larger.
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, find_device(device))
    split = study.split("target_data", None)
    (samples,) = loaded.ordered(split)
    loaded = loaded.in_pieces(samples, memory_mb)
    output = loaded.output
    few, n_classes = loaded.few(samples)
    needed = loaded.memory(few, memory_mb).mapped(lambda memory: replace(memory, gradient_bytes=0))
    room = MemoryBudget(needed, budget_bytes(loaded.device, memory_mb))

    def compute(first: int, last: int) -> list[Tensor]:
        batch = loaded.checked(samples, first, last, n_classes)
        read = output.read(call(loaded.model, batch))
        columns = (
            vmap(output.label_number)(batch.labels),
            over_samples(output.value, read, batch.labels),
            over_samples(output.prediction or output.value, read, batch.labels),
        )
        return [column.cpu() for column in columns]

    with torch.no_grad(), in_evaluation_mode(loaded.model):
        blocks = in_chunks(compute, len(samples), samples.batches_of(batch_size, room))
        computed = with_progress(blocks, len(samples), "samples")
        parts = [tensors for *_, tensors in samples.in_order(computed)]
    labels, values, predictions = (torch.cat(column) for column in zip(*parts, strict=True))
    file_spec = loaded.file_spec(spec, spec.projection)
    provenance = software(code, device_name(loaded.device), "torch", "numpy")
    with create(outputs, OUTPUTS, file_spec, provenance) as writer:
        writer.vector("sample_ids", list(split.ids))
        writer.vector("labels", labels.numpy())
        writer.vector("outputs", values.float().numpy())
        writer.vector("predictions", predictions.numpy())


# The number of samples that are sorted by length together. Their embeddings stay in memory until
# all of them can be written in the original order.
_WINDOW = 1024


def compute_embeddings(
    *,
    embeddings: Path,
    checkpoint: Path,
    study_file: Path,
    spec: FeaturesSpec,
    code: str,
    device: str,
    batch_size: int,
    threads: int,
) -> None:
    """Write the embeddings of all training samples and targets.

    An embedding is the input of the model's last linear layer. The matrices ``train`` and
    ``targets`` in the file have shape (samples, width of this input).
    """
    torch.set_num_threads(threads)
    study = Study.load(study_file)
    loaded = LoadedModel.of_study(study, checkpoint, spec, find_device(device))
    file_spec = loaded.file_spec(spec, spec.projection)
    provenance = software(code, device_name(loaded.device), "torch", "numpy")
    with create(embeddings, EMBEDDINGS, file_spec, provenance) as writer:
        for key, name in (("train", TRAIN), ("targets", "targets")):
            split = study.split(name, None)
            (samples,) = loaded.ordered(split, window=_WINDOW)

            def compute(first: int, last: int, samples: OrderedSamples = samples) -> list[Tensor]:
                return [embed_samples(loaded.model, loaded.batch(samples, first, last)).cpu()]

            values = None
            blocks = in_chunks(compute, len(samples), samples.batches_of(batch_size))
            computed = with_progress(blocks, len(samples), "samples")
            for start, stop, (rows,) in samples.in_order(computed):
                if values is None:
                    values = writer.matrix(key, split.ids, range(rows.shape[1]))
                values[start:stop] = rows.numpy()
