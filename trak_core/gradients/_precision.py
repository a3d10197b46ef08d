"""How exactly a model computes: what two ways to compute the same may differ by."""

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trak_core.gradients._batch import Batch

# Convolutions on CUDA round float32 to TF32, 10 bits.
_TF32 = 2.0**-10


def floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested containers."""
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def rounding(model: nn.Module, batch: Batch) -> float:
    """Return how far two ways to compute the same may differ, relative to the largest number.

    That is the square root of the unit roundoff of the coarsest numbers that any layer returns
    (autocast may make them coarser than weights and outputs): far above what rounding adds up to,
    far below what a wrong computation gives.

    Args:
        model: Run once, in the mode it is in.
        batch: A few samples.
    """
    epsilons = [torch.finfo(p.dtype).eps for p in floats(list(model.parameters()))]
    devices = {p.device.type for p in model.parameters()}

    def look(module: nn.Module, args: Any, result: Any) -> None:
        epsilons.extend(torch.finfo(tensor.dtype).eps for tensor in floats(result))

    with ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(module.register_forward_hook(look).remove)
        batch.given_to(model)
    if "cuda" in devices:
        epsilons.append(_TF32)
    return math.sqrt(max(epsilons))
