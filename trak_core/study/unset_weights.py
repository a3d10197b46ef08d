"""Build a model without drawing the weights that a checkpoint replaces anyway.

Drawing them takes longer than reading them. Which numbers come from them is followed while the
model is built: where any would outlive the weights, the model is built as it is.
"""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trak_core.study.checkpoints import loads_whole, weights_bytes
from trak_core.study.study import Study

# Weights of fewer bytes are drawn: that takes a second.
_LARGE_BYTES = 2**28
_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
# Ways to a tensor's numbers that pass by torch's operations.
_READS = (
    *("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "_typed_storage"),
    *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"),
)


def model_to_load(study: Study, checkpoint: Path) -> nn.Module:
    """Return the study's model, to be given the weights of a checkpoint.

    Until then a large one's weights may hold anything: all that does is replaced as a whole. All
    else is as ``make_model`` makes it. Where that draws other numbers, looks at those of weights
    or keeps what is made of them, it is called again, and draws.
    """
    if weights_bytes(checkpoint) < _LARGE_BYTES:
        return study.make_model()
    # ruff: ignore[numpy-legacy-random] -- a study may draw from it
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    undrawn, model = _Undrawn(), None
    # What the study raises comes again.
    with suppress(Exception, _DrawsNeededError), _Reads(undrawn), undrawn:
        model = study.make_model()
    if model is not None and undrawn.is_kept_by(model):
        return model
    model = None  # before the next
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # ruff: ignore[numpy-legacy-random]
    return study.make_model()


class _DrawsNeededError(BaseException):
    """Something depends on numbers that were not drawn."""


class _Undrawn(TorchDispatchMode):
    """Leaves tensors as they are where they would be filled with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        # Storages that hold no numbers, or what was made of those, by address.
        self._storages: dict[int, StorageWeakRef] = {}
        self._is_needed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _tensors((args, kwargs))
        if func in _DRAWS and not (kwargs or {}).get("generator"):
            self._note(given)
            return args[0]
        is_unset = any(map(self.is_unset, given))
        if torch.Tag.nondeterministic_seeded in func.tags or (
            is_unset and torch.Tag.data_dependent_output in func.tags
        ):
            self.need()
        returned = func(*args, **(kwargs or {}))
        if is_unset:
            self._note(_tensors(returned) + (given if func._schema.is_mutable else []))
        return returned

    def _note(self, tensors: list[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def is_unset(self, tensor: Tensor) -> bool:
        """Whether a tensor's numbers may depend on those that were not drawn."""
        return bool(self._storages) and tensor.untyped_storage()._cdata in self._storages

    def need(self) -> None:
        """Give up."""
        self._is_needed = True  # the study may catch what is raised
        raise _DrawsNeededError

    def is_kept_by(self, model: nn.Module) -> bool:
        """Whether all that has no numbers, and still exists, is replaced with a checkpoint's."""
        if self._is_needed or not loads_whole(model):
            return False
        replaced = {
            tensor.untyped_storage()._cdata
            for tensor in model.state_dict().values()
            if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        }
        return all(
            address in replaced or storage.expired() for address, storage in self._storages.items()
        )


class _Reads(TorchFunctionMode):
    """Gives up where numbers that were not drawn are read past torch's operations."""

    def __init__(self, undrawn: _Undrawn) -> None:
        super().__init__()
        self._undrawn = undrawn

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", None) in _READS and any(
            map(self._undrawn.is_unset, _tensors(args))
        ):
            self._undrawn.need()
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
