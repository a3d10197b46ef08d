"""Any loss: minus the number that the model returns for each sample."""

from torch import Tensor

from trak_core.model_outputs.model_output import ModelOutput, at_least_float32, read_logits


def _minus(losses: Tensor, label: Tensor) -> Tensor:
    return -at_least_float32(losses.squeeze())


# l = -f, so that Q is 1, as where nothing is said.
LOSS = ModelOutput(read=read_logits, value=_minus, has_labels=False)
