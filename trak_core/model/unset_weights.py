"""Build a model whose weights are read afterwards, without drawing the ones it begins with."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def without_drawing(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Return ``make_model()`` with weights of any values, if all of them can be read afterwards.

    Random numbers that are only written into parameters and persistent buffers are not drawn, nor
    is their memory touched. A ``make_model`` that draws others, or computes with them, is called
    once more and draws them all: so nothing except what a state dict holds ever differs.
    """
    with _Undrawn() as undrawn:
        model = make_model()
    own = {t.untyped_storage()._cdata for t in model.state_dict().values() if isinstance(t, Tensor)}
    return model if undrawn.are_within(own) else make_model()


class _Undrawn(TorchDispatchMode):
    """Leaves out what fills tensors with random numbers, and follows where these would have gone.

    Attributes:
        is_safe: Whether nothing depends on them that isn't one of those tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_safe = True
        # Not the storages themselves, so that they can go.
        self._storages: dict[int, StorageWeakRef] = {}

    def are_within(self, storages: set[int]) -> bool:
        """Whether the tensors lie in these storages, or are gone."""
        refs = self._storages.items()
        return self.is_safe and all(i in storages or ref.expired() for i, ref in refs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        undrawn = [t for t in _tensors((args, kwargs)) if self._has(t)]
        if not (draws or undrawn):
            return func(*args, **kwargs)
        fills = func._schema.name.endswith("_") and isinstance(args[0], Tensor)
        if fills and (self._has(args[0]) or (draws and not undrawn)):
            storage = args[0].untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)
            return args[0]
        result = func(*args, **kwargs)
        returned = list(_tensors(result))
        # Views of these tensors alone.
        self.is_safe &= not draws and bool(returned) and all(map(self._has, returned))
        return result

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
