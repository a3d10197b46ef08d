"""Embed training samples and all possible targets under one checkpoint, for a baseline."""

from pathlib import Path

import torch
from torch import Tensor

from trak_core.artifacts import EMBEDDINGS, create
from trak_core.gradients import in_chunks
from trak_core.model.loaded_model import LoadedModel, device_name, find_device
from trak_core.model.sample_order import OrderedSamples
from trak_core.model.sample_outputs import embed_samples
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.system.progress import software, with_progress

# Samples whose embeddings are kept where texts are ordered by length among themselves.
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
    """Write what enters the model's last linear layer, for every sample of both pools.

    The frames ``train`` and ``targets`` have shape (samples, width).
    """
    torch.set_num_threads(threads)
    loaded = LoadedModel.load(study_file, checkpoint, spec, find_device(device))
    file_spec = loaded.file_spec(spec, spec.projection)
    provenance = software(code, device_name(loaded.device), "torch", "numpy")
    with create(embeddings, EMBEDDINGS, file_spec, provenance) as writer:
        for key, name in (("train", TRAIN), ("targets", "targets")):
            split = loaded.study.split(name, None)
            (samples,) = loaded.ordered(split, window=_WINDOW)

            def computed(first: int, last: int, samples: OrderedSamples = samples) -> list[Tensor]:
                return [embed_samples(loaded.model, loaded.batch(samples, first, last)).cpu()]

            values = None
            blocks = in_chunks(computed, len(samples), samples.batches_of(batch_size))
            taken = with_progress(blocks, len(samples), "samples")
            for start, stop, (rows,) in samples.in_order(taken):
                if values is None:
                    values = writer.matrix(key, split.ids, range(rows.shape[1]))
                values[start:stop] = rows.numpy()
