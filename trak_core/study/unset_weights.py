"""Build a model whose weights a checkpoint will give, without drawing them first.

Drawing takes a large model's job longer than reading its weights does. Whatever comes of numbers
that were not drawn is followed: if it is anywhere but in weights that will be read, the model is
built again, with all its numbers.
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
# What torch.nn.init does to numbers that it drew.
_IN_PLACE = {getattr(torch.ops.aten, name) for name in ("add_", "clamp_", "erfinv_", "mul_")}
# How numbers leave torch without an operation of its own.
_READS = {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__),
}


class _ReadError(Exception):
    """Ends a build that looks at numbers which were not drawn."""


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _WithoutDraws(TorchDispatchMode):
    """Leaves draws out, and knows the storages whose numbers are others for it."""

    def __init__(self) -> None:
        super().__init__()
        # Weak, so that none is kept, and no other takes the place of one that is gone.
        self._others: dict[int, StorageWeakRef] = {}
        self.was_read = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, a second of every job, to pass this over

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._others

    def refuse_to_read(self) -> None:
        self.was_read = True
        raise _ReadError

    def is_within(self, tensors: Iterable[Tensor]) -> bool:
        """Whether what is still there of other numbers fills whole tensors of these."""
        whole = {
            t.untyped_storage()._cdata for t in tensors if t.untyped_storage().nbytes() == t.nbytes
        }
        return all(key in whole for key, ref in self._others.items() if not ref.expired())

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._others:
                self._others[storage._cdata] = StorageWeakRef(storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        if draws and func.overloadpacket in _DRAWS:
            self._add(given)
            return args[0]
        others = draws or any(map(self.holds, given))
        if others and len(given) == 1 and func.overloadpacket in _IN_PLACE:
            return args[0]
        returned = func(*args, **kwargs)
        if others:
            if returned is not None and not _tensors(returned):
                self.refuse_to_read()
            self._add(_tensors(returned))
            if func._schema.is_mutable:
                self._add(given)
        return returned


class _WatchReads(TorchFunctionMode):
    def __init__(self, build: _WithoutDraws) -> None:
        super().__init__()
        self._build = build

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS and any(map(self._build.holds, _tensors(args))):
            self._build.refuse_to_read()
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_redraws() -> Generator[None, None, None]:
    """Have torch draw truncated numbers as any others: it looks at them, and draws some again."""
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
    """Return a model whose ``state_dict`` may hold any numbers, and that is as built otherwise.

    None where that can't be told: a build that fails so, reads numbers that it drew, or keeps
    anything that came of them outside of whole entries of the state dict, such as random features.
    The random numbers of torch are then as before.
    """
    state = torch.get_rng_state()
    build = _WithoutDraws()
    # Its own errors come when it is built with numbers.
    with suppress(Exception):
        with _without_redraws(), build, _WatchReads(build):
            model = make_model()
        stored = _tensors(list(model.state_dict().values()))
        if not build.was_read and build.is_within(stored):
            return model
    torch.set_rng_state(state)
    return None
