"""Python branches on tensors inside vmap: all samples that take the same branch go together.

``if mask.all()`` asks for one answer where vmap holds many. If all samples agree, that is the
answer; if they don't, the batch is to be cut in two. transformers' models ask so of their attention
masks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# torch.func has no public way to look at the values behind a tensor inside vmap.
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


class SamplesDisagree(Exception):
    """Samples of one batch take different branches.

    Attributes:
        answers: Which branch each takes, booleans of shape (batch,).
    """

    def __init__(self, answers: Tensor) -> None:
        """Keep the answers."""
        super().__init__("samples take different branches")
        self.answers = answers


def _answers(condition: Tensor) -> Tensor | None:
    """Return a scalar condition's value for each sample; None if it doesn't depend on them."""
    levels = 0
    while _functorch.is_functorch_wrapped_tensor(condition):
        levels += _functorch.is_batchedtensor(condition)
        condition = _functorch.get_unwrapped(condition)
    # More levels are a vmap of the model's own, which has no single answer a sample.
    return condition.bool().flatten() if levels == 1 else None


class Branches(TorchFunctionMode):
    """Inside it, ``bool(tensor)`` within one vmap answers for all samples.

    Raises:
        SamplesDisagree: If they have different answers.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer ``Tensor.__bool__``; pass on everything else."""
        if func is Tensor.__bool__ and args[0].numel() == 1:
            answers = _answers(args[0])
            if answers is not None:
                if answers.all():
                    return True
                if answers.any():
                    raise SamplesDisagree(answers)
                return False
        return func(*args, **(kwargs or {}))
