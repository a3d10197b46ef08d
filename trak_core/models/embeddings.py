"""What a model makes of a sample before its last linear layer."""

from typing import Any

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import Batch, call, in_evaluation_mode


def embedded(model: nn.Module, batch: Batch) -> Tensor:
    """Return the inputs of the last ``torch.nn.Linear`` that a forward pass calls.

    Dimensions between the first and the last, such as the tokens of a text, are averaged over;
    of texts of different lengths their own tokens alone.

    Args:
        model: On the batch's device; used in evaluation mode and left as it was.
        batch: The samples.

    Returns:
        Shape (batch, width), float32.

    Raises:
        InputError: If the model calls no such layer, or not with a row a sample.
    """
    seen: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen[:] = [inputs[0].detach()]

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with torch.no_grad(), in_evaluation_mode(model):
            call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    lengths = batch.lengths
    is_good = bool(seen) and seen[0].ndim >= 2 and len(seen[0]) == len(batch)
    if is_good and lengths is not None:
        is_good = seen[0].shape[1:-1] in {(), batch.labels.shape[1:]}
    if not is_good:
        found = f"one with inputs of shape {tuple(seen[0].shape)}" if seen else "none"
        raise InputError(
            "Embeddings are what enters the last torch.nn.Linear that the model calls, one row a "
            "sample, or a token of texts that differ in length. "
            f"Found {found} for {len(batch)} samples. Leave embedding_cosine out of "
            "evaluation.baselines."
        )
    rows = seen[0].float()
    if lengths is not None and rows.ndim > 2:
        counts = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return (rows * counts[..., None]).sum(dim=1) / lengths[:, None]
    return rows.reshape(len(rows), -1, rows.shape[-1]).mean(dim=1)
