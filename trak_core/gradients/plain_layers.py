"""Have layers run in their plain form, in which their gradients are those of f and can be read."""

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

# Settings of tables that change how their gradient is kept for an optimizer, or scale it.
_OF_TABLES = "sparse", "scale_grad_by_freq"


@contextmanager
def plain_layers(model: nn.Module) -> Generator[None, None, None]:
    """Run a model so that autograd gives the gradients of its output, as tensors that can be read.

    Tables of embeddings give dense gradients, which counts of words don't divide. What a model
    calls by ``torch.utils.checkpoint`` is called itself: a graph that computes activations again
    lets them be read only once. What was compiled runs as it is written. No number of the model's
    output changes.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # which is slow to import, and compiles nothing before
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                for name in _OF_TABLES:
                    if getattr(module, name):
                        _put(stack, module, name, False)
        # A model may have imported the function itself, which looks these up in its module.
        _put(stack, checkpoint, "CheckpointFunction", _Called)
        if hasattr(checkpoint, "_checkpoint_without_reentrant_generator"):
            _put(stack, checkpoint, "_checkpoint_without_reentrant_generator", _called)
        yield


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class _Called:
    """Stands for torch's function of the same method, and calls what it is given."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _called(*_: Any, **__: Any) -> Generator[None, None, None]:
    """Stand for the code that torch runs before and after what it checkpoints."""
    yield
