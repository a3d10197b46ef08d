"""Build a model without the random initialization of weights that a checkpoint will replace.

Initializing a large model takes longer than reading its weights. ``torch.nn.utils.skip_init`` and
the meta device support only modules without computed buffers. This module skips the operations that
draw random numbers, but computes values that do not depend on them, such as buffers of frequencies.
If a tensor that depends on a skipped draw is not in the state dict, no checkpoint would replace it,
so the model has to be built again with all draws.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_DRAWS = {torch.ops.aten.normal_, torch.ops.aten.uniform_}
# Operations with which torch.nn.init transforms random numbers in place. They are skipped, too.
_IN_PLACE = {getattr(torch.ops.aten, name) for name in ("add_", "clamp_", "erfinv_", "mul_")}
# Methods that read values without an operation of torch, so a TorchDispatchMode does not notice.
_READS = {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__),
}


class _ReadError(Exception):
    """The exception that stops the building of a model that reads values of skipped draws."""


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _WithoutDraws(TorchDispatchMode):
    """A mode that skips random draws, and records the storages whose values depend on them."""

    def __init__(self) -> None:
        super().__init__()
        # As long as a weak reference exists, the address of a deleted storage is not used again.
        self._undrawn: dict[int, StorageWeakRef] = {}
        self.was_read = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler, which takes a second.

    def is_undrawn(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._undrawn

    def refuse_to_read(self) -> None:
        self.was_read = True
        raise _ReadError

    def are_all_in(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether each recorded storage is deleted, or is that of a whole tensor."""
        whole = {
            t.untyped_storage()._cdata for t in tensors if t.untyped_storage().nbytes() == t.nbytes
        }
        return all(key in whole for key, ref in self._undrawn.items() if not ref.expired())

    def _record(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._undrawn:
                self._undrawn[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if is_draw and func.overloadpacket in _DRAWS:
            self._record(given)
            return args[0]
        depends = is_draw or any(map(self.is_undrawn, given))
        if depends and len(given) == 1 and func.overloadpacket in _IN_PLACE:
            return args[0]
        returned = func(*args, **kwargs)
        if depends:
            if returned is not None and not _tensors(returned):
                self.refuse_to_read()
            self._record(_tensors(returned))
            if func._schema.is_mutable:
                self._record(given)
        return returned


class _WatchReads(TorchFunctionMode):
    def __init__(self, build: _WithoutDraws) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS and any(map(self._build.is_undrawn, _tensors(args))):
            self._build.refuse_to_read()
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_redraws() -> Generator[None, None, None]:
    """Replace truncated normal draws, which read their numbers, by plain ones that do not."""
    name = "_no_grad_trunc_normal_"
    own: Any = getattr(nn.init, name, None)

    @torch.no_grad()
    def drawn(tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        return own(tensor, *args, generator=generator) if generator else tensor.normal_()

    if own is not None:
        setattr(nn.init, name, drawn)
    try:
        yield
    finally:
        if own is not None:
            setattr(nn.init, name, own)


def built_without_draws(make_model: Callable[[], nn.Module]) -> nn.Module | None:
    """Return the model that ``make_model`` builds, with arbitrary values in its ``state_dict``.

    Return None, and restore torch's random state, if ``make_model`` fails, reads random numbers, or
    stores values that depend on them outside of the state dict.
    """
    state = torch.get_rng_state()
    build = _WithoutDraws()
    with suppress(Exception):  # The caller calls make_model() again, which then raises its error.
        with _without_redraws(), build, _WatchReads(build):
            model = make_model()
        stored = _tensors(list(model.state_dict().values()))
        if not build.was_read and build.are_all_in(stored):
            return model
    torch.set_rng_state(state)
    return None
