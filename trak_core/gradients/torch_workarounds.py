"""Have autograd give the gradients of f where torch's kernels or layers' settings would not."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from trak_core.autograd.graph import Node, name_of

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


@contextmanager
def memory_formats_kept_apart(values: Tensor) -> Generator[None, None, None]:
    """Run backward passes in which BatchNorm reads gradients in the order in which they lie.

    torch's CPU kernel runs over gradient and input side by side, if both are dense and their
    strides suggest one memory format. A dimension of size 1, above all the samples' in a batch of
    one, may have any stride, so that a gradient with the channels last suggests that they come
    first. Then gradients of all that lies above the layer are wrong, in training mode too. A
    gradient with gaps goes through the kernel that heeds strides.

    InstanceNorm is a BatchNorm with one sample. Gradients that torch reads rightly stay as they
    are, bit for bit. The passes begin at ``values`` or below.
    """
    stack: list[Node] = [] if values.grad_fn is None else [values.grad_fn]
    seen = set(stack)
    # Hooks must go: they hold their node, which holds them.
    with ExitStack() as hooks:
        while stack:
            node = stack.pop()
            if name_of(node) == "NativeBatchNorm":
                hooks.callback(node.register_prehook(_reader(node)).remove)
            used = {n for n, _ in node.next_functions if n is not None} - seen
            seen |= used
            stack.extend(used)
        del seen
        yield


def _reader(node: Node) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...] | None]:
    def read(gradients: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        gradient, *others = gradients
        # Raw, because checkpointed activations may be unpacked only once; they are no tensors yet.
        saved = node._raw_saved_input.data
        if 1 not in gradient.shape or not _may_be_confused(gradient, saved):
            return None
        return (torch.nn.functional.pad(gradient, (0, 1))[..., :-1], *others)

    return read


def _may_be_confused(gradient: Tensor, saved: object) -> bool:
    first, last = _dense_formats(gradient)
    if not isinstance(saved, Tensor):
        return first != last
    saved_first, saved_last = _dense_formats(saved)
    differ = not ((first and saved_first) or (last and saved_last))
    return differ and (first or last) and (saved_first or saved_last)


def _dense_formats(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether entries lie one after another with the channels first, and last.

    ``Tensor.is_contiguous`` says the same, but not under vmap.
    """
    dims = list(range(tensor.ndim))
    first, last = (_is_dense(tensor, order) for order in (dims, [0, *dims[2:], 1]))
    return first, last and tensor.ndim > 3


def _is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    stride = 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            continue
        if tensor.stride(dim) != stride:
            return False
        stride *= tensor.shape[dim]
    return True
