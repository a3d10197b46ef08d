"""Embed training samples and all possible targets under one checkpoint, for a baseline."""

from pathlib import Path
from typing import Any

import torch

from trak_core.artifacts import EMBEDDINGS, create
from trak_core.models.device import device_name, find_device
from trak_core.models.embeddings import embeddings
from trak_core.models.loaded import Subject
from trak_core.study.study import TRAIN
from trak_core.system.progress import blocks_with_progress
from trak_core.system.software import software

PROJECTION = {"kind": "embedding"}


def compute_embeddings(
    *,
    embeddings_file: Path,
    checkpoint: Path,
    study: Path,
    spec: dict[str, Any],
    code: str,
    device: str,
    batch_size: int,
    threads: int,
) -> None:
    """Write what enters the model's last linear layer, for every sample of both pools.

    Args:
        embeddings_file: The file to write: the frames ``train`` and ``targets``, (samples, width).
        checkpoint: File or folder with the weights.
        study: The study's Python file.
        spec: From the config: checkpoint (id), model_output, parameter_patterns, study (digest).
        code: The stage's code digest.
        device: ``cpu`` or ``cuda``.
        batch_size: Samples at once.
        threads: For torch.

    Raises:
        InputError: If the model calls no linear layer.
    """
    torch.set_num_threads(threads)
    subject = Subject.load(study, checkpoint, spec, find_device(device))
    asked = {**spec, "dtype": "float32", "targets": None}
    file_spec = subject.file_spec(asked, checkpoint, "all", PROJECTION)
    provenance = software(code, device_name(subject.device), "torch", "numpy")
    with create(embeddings_file, EMBEDDINGS, file_spec, provenance) as writer:
        for key, name in (("train", TRAIN), ("targets", "targets")):
            split = subject.study.split(name, None)
            values = None
            for start, stop in blocks_with_progress(len(split.ids), batch_size, "samples"):
                rows = embeddings(subject.model, subject.batch(split, start, stop)).cpu().numpy()
                if values is None:
                    values = writer.matrix(key, split.ids, range(rows.shape[1]))
                values[start:stop] = rows
