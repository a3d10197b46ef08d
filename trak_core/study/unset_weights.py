"""Build a model without drawing the weights that a checkpoint will replace.

Drawing the weights of a large model takes longer than reading them. ``torch.nn.utils.skip_init``
and the meta device support only single modules without buffers. This differs from them in: 1. any
``make_model()`` is built; 2. values that do not depend on drawn numbers, such as buffers of
frequencies, are computed; 3. the build is followed operation by operation, and a model whose other
values depend on drawn numbers is built again, with all numbers.
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
# Operations by which torch.nn.init transforms drawn numbers.
_IN_PLACE = {getattr(torch.ops.aten, name) for name in ("add_", "clamp_", "erfinv_", "mul_")}
# Methods that read numbers without an operation of torch.
_READS = {
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__),
}


class _ReadError(Exception):
    """End a build that reads undrawn numbers."""


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


class _WithoutDraws(TorchDispatchMode):
    """Skip draws, and record the storages that depend on undrawn numbers."""

    def __init__(self) -> None:
        super().__init__()
        # Weak references keep no storage alive, and prevent the reuse of its address.
        self._undrawn: dict[int, StorageWeakRef] = {}
        self.was_read = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch's compiler, which takes a second

    def is_undrawn(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._undrawn

    def refuse_to_read(self) -> None:
        self.was_read = True
        raise _ReadError

    def are_all_in(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether each living undrawn storage is the whole of one of these tensors."""
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
    """Replace torch's truncated normal draws, which read the numbers, by plain normal draws."""
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
    """Return a model as ``make_model`` builds it, except for the numbers in its ``state_dict``.

    Returns None, and restores torch's random state, if the build fails, reads numbers that it drew,
    or keeps a value that depends on them outside of whole entries of the state dict, such as random
    features.
    """
    state = torch.get_rng_state()
    build = _WithoutDraws()
    with suppress(Exception):  # an error of make_model() is raised when it is called again
        with _without_redraws(), build, _WatchReads(build):
            model = make_model()
        stored = _tensors(list(model.state_dict().values()))
        if not build.was_read and build.are_all_in(stored):
            return model
    torch.set_rng_state(state)
    return None
