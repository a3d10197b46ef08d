"""What scores take from a checkpoint's files of training samples and targets."""

import numpy as np

from trak_core.artifacts import Artifact, Writer
from trak_core.errors import InputError
from trak_core.spec import Weighting

_PER_SAMPLE = ("labels", "outputs", "predictions")


def normal_weights(train: Artifact, weighting: str) -> np.ndarray:
    """Return the diagonal of W: ones, or the curvature of the training samples' loss.

    Raises:
        InputError: If the file holds no curvature where that is asked for.
    """
    if Weighting(weighting) is Weighting.PLAIN:
        return np.ones(len(train.vector("sample_ids")))
    if not train.has("curvature"):
        raise InputError(
            f"{train.path}: training samples weighted by `curvature` must come with the curvature "
            f"of their loss. The model output {train.spec['model_output']} has none; set "
            "scoring.weighting to plain."
        )
    return train.vector("curvature")


def write_samples(writer: Writer, train: Artifact, targets: Artifact) -> None:
    """Write ids and what the checkpoint makes of every sample, and the loss weights."""
    writer.vector("loss_weights", train.vector("loss_weights"))
    for side, file in (("train", train), ("target", targets)):
        writer.vector(f"{side}_ids", file.ids("sample_ids"))
        for key in _PER_SAMPLE:
            writer.vector(f"{side}_{key}", file.vector(key))
