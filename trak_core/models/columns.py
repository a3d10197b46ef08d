"""What a model says of each sample, as it stands beside gradients in a file."""

from collections.abc import Sequence

from torch import Tensor

from trak_core.artifacts import Writer
from trak_core.model_outputs.table import TABLE
from trak_core.spec import FeaturesSpec
from trak_core.study.study import TRAIN


def write_columns(
    writer: Writer, ids: Sequence[object], columns: Sequence[Tensor], spec: FeaturesSpec
) -> None:
    """Write ids, label numbers and ``PerSample.columns``; of targets no loss weights."""
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
    """Say when most training samples are fitted so well that their scores all but vanish."""
    if not TABLE[model_output].weight_is_probability:
        return
    saturated = (loss_weights.abs() < 1e-3).float().mean().item()
    if saturated > 0.5:
        print(
            f"Warning: {saturated:.0%} of the training samples have a loss weight below 1e-3: they "
            "are fitted almost exactly and get scores near 0. A smaller loss_weight_power, or an "
            "earlier checkpoint, ranks them better.",
            flush=True,
        )
