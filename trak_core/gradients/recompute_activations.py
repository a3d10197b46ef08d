"""Save memory: recompute the activations of a model's repeated blocks in the backward pass.

After the call of a block, only the block's inputs stay in memory. When the backward pass first
needs a tensor that an operation of the block has saved, the block is called again, which restores
all its saved tensors. A saved tensor is freed together with the node of the graph that saved it, or
when the next block is recomputed.

Unlike with ``torch.utils.checkpoint``, the graph contains the nodes of all operations, which
``one_pass`` reads, and the model's code doesn't have to be changed. The saved tensors of both calls
are compared by fingerprints, and an ``InputError`` is raised if they differ. A block is not
recomputed if it may modify its arguments, because the second call would then get other values.

Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

import math
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from trak_core.errors import InputError
from trak_core.gradients.differentiable_model import graph_to, in_evaluation_mode

# Types of arguments with which a block can be called twice. If a block modifies a tensor, the
# tensor's version counter reveals this. Objects of the other types can't be modified.
_SAFE_TYPES = (Tensor, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)
# Saved tensors of these dtypes are not compared between two calls, because they may be
# uninitialized workspaces or seeds, which differ although the results are equal.
_NOT_COMPARED = (torch.uint8, torch.uint64)
# Allowed difference between the numbers of two calls, in machine epsilons. It is not 0, because a
# GPU may sum in a different order in each call.
_ROUNDING = 8


class Recomputation:
    """Recompute the activations of a model's repeated blocks instead of keeping them in memory."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.blocks = _repeated_blocks(model)
        self.is_on = False  # whether the blocks are recomputed
        # A weak reference to the call that was repeated last, and whose tensors are in memory.
        self.restored: Callable[[], _Call | None] = lambda: None
        # For ``sample_memory``: the size in bytes of each storage that stays in memory, by address,
        # and the largest number of bytes that one call of a block frees.
        self._kept: dict[int, int] = {}
        self._largest_freed = 0
        # Names of the classes of blocks that keep all saved tensors, as they can't be called twice.
        self.not_recomputed: set[str] = set()

    def start(self) -> None:
        """Replace each block's ``forward``, so that its activations are recomputed from now on."""
        self.is_on = True
        for block in self.blocks:
            block.forward = _Forward(self, block, block.forward)
        for module in self._model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is True:
                config.use_cache = False  # the second call of a block would fill the cache again

    def notice(self) -> str:
        kinds = Counter(type(block).__name__ for block in self.blocks)
        names = ", ".join(f"{n} {name}" for name, n in kinds.items())
        exceptions = ", ".join(sorted(self.not_recomputed))
        exceptions = exceptions and (
            " The following blocks write into their arguments, or get objects other than tensors, "
            f"plain values, lists, tuples and dicts. They keep all activations: {exceptions}."
        )
        return (
            "the activations of one sample don't fit into memory. The model's repeated blocks "
            f"({names}) keep only their inputs and are recomputed in the backward pass, which "
            f"gives the same numbers but takes longer.{exceptions}"
        )

    def begin_count(self) -> None:
        self._kept, self._largest_freed = {}, 0

    def count(self, kept: dict[int, int], freed_bytes: int) -> None:
        """Count the memory of a block's call.

        ``kept`` contains the sizes of storages that stay in memory, by address.
        """
        self._kept.update(kept)
        self._largest_freed = max(self._largest_freed, freed_bytes)

    def peak_bytes(self, excluded: set[int]) -> int:
        """Return the peak memory of the counted calls, without the storages in ``excluded``."""
        kept = sum(n for address, n in self._kept.items() if address not in excluded)
        return kept + self._largest_freed


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in each module list that contains several modules of the same class.

    Module lists inside of such a module are ignored, because the whole module is recomputed.
    """
    blocks: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # outer modules come before inner modules
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module if next(child.parameters(), None) is not None]
        if len({type(child) for child in children}) < len(children):
            blocks += [child for child in children if child not in inside]
            inside.update(m for child in children for m in child.modules())
    return blocks


class _Forward:
    """The replacement of a block's ``forward``. It is not a closure, so deepcopy can copy it."""

    def __init__(self, owner: Recomputation, block: nn.Module, forward: Callable[..., Any]):
        self.owner, self.block, self.forward = owner, block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.block.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not all(isinstance(leaf, _SAFE_TYPES) for leaf in pytree.tree_leaves((args, kwargs))):
            self.owner.not_recomputed.add(type(self.block).__name__)
            return self.forward(*args, **kwargs)
        return _Call(self, args, kwargs).run(args, kwargs)


class _Saved:
    """A tensor that an operation has saved, or None while it is not in memory."""

    __slots__ = ("__weakref__", "call", "tensor")

    def __init__(self, call: "_Call", tensor: Tensor):
        self.call = call
        self.tensor: Tensor | None = tensor

    def unpack(self) -> Tensor:
        if self.tensor is None:
            self.call.repeat()
        assert self.tensor is not None
        return self.tensor


class _Call:
    """A call of a block, with everything that is needed to repeat the call."""

    def __init__(self, replacement: _Forward, args: Sequence[Any], kwargs: dict[str, Any]):
        self.owner, self.block = replacement.owner, replacement.block
        self.forward = replacement.forward
        # The tensors among the arguments are detached, because their graph would otherwise stay in
        # memory. They share memory and version counters with the original tensors.
        self.arguments = pytree.tree_map_only(
            Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), (tuple(args), kwargs)
        )
        leaves = pytree.tree_leaves(self.arguments)
        self.inputs = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        parameters = list(self.block.parameters())
        self.trained = [p for p in parameters if p.requires_grad]
        self.own = {p.untyped_storage().data_ptr() for p in parameters}
        self.saved: list[weakref.ref[_Saved]] = []
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.fingerprints: list[int | Tensor | None] = []
        device = parameters[0].device
        dtype, is_on = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        self.autocast = torch.autocast(device.type, dtype, is_on)
        self.gpus = [device] if device.type == "cuda" else []
        self.random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.gpus)]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the block, free the tensors that its operations saved, and return the result."""
        alive: list[tuple[_Saved, Tensor]] = []

        def pack(tensor: Tensor) -> Tensor | _Saved:
            if self._is_own(tensor):
                return tensor.detach()
            saved = _Saved(self, tensor.detach())
            alive.append((saved, tensor))
            self.kinds.append((tensor.shape, tensor.dtype))
            self.fingerprints.append(_fingerprint(tensor))
            return saved

        def unpack(packed: Tensor | _Saved) -> Tensor:
            return packed.unpack() if isinstance(packed, _Saved) else packed

        with saved_tensors_hooks(pack, unpack):
            returned = self.forward(*args, **kwargs)
        self.saved = [weakref.ref(saved) for saved, _ in alive]
        sizes = _sizes(tensor for _, tensor in alive)
        kept = _sizes(tensor for tensor, _ in self.inputs)
        if self._are_inputs_modified():
            self.owner.count(kept | sizes, 0)
            self.owner.not_recomputed.add(type(self.block).__name__)
            return returned
        freed = sum(n for address, n in sizes.items() if address not in kept)
        self.owner.count(kept, freed)
        for saved, _ in alive:
            saved.tensor = None
        alive.clear()  # the graph keeps ``pack`` alive, and thereby this list
        return returned

    def repeat(self) -> None:
        """Call the block again, and restore the saved tensors that the graph still refers to."""
        if self._are_inputs_modified():
            raise self._refusal("its inputs had been modified")
        previous = self.owner.restored()
        if previous is not None:
            for reference in previous.saved:
                if (saved := reference()) is not None:
                    saved.tensor = None
        self.owner.restored = weakref.ref(self)
        tensors: list[Tensor] = []
        fingerprints: list[int | Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            if not self._is_own(tensor):
                tensors.append(tensor.detach())
                fingerprints.append(_fingerprint(tensor))

        # ``tree_map`` copies lists and dicts, because a block may modify them.
        args, kwargs = pytree.tree_map(lambda leaf: leaf, self.arguments)
        with ExitStack() as stack:
            stack.enter_context(in_evaluation_mode(self.block))
            stack.enter_context(graph_to(self.block, self.trained))
            stack.enter_context(self.autocast)
            stack.enter_context(torch.random.fork_rng(self.gpus))
            torch.set_rng_state(self.random[0])
            for gpu, state in zip(self.gpus, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            stack.enter_context(saved_tensors_hooks(pack, _never))
            self.forward(*args, **kwargs)
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != self.kinds:
            raise self._refusal("it saved other tensors")
        pairs = zip(fingerprints, self.fingerprints, self.kinds, strict=True)
        if not all(_agree(new, old, dtype) for new, old, (_, dtype) in pairs):
            raise self._refusal("it saved other numbers")
        for reference, tensor in zip(self.saved, tensors, strict=True):
            if (saved := reference()) is not None:
                saved.tensor = tensor

    def _is_own(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.own

    def _are_inputs_modified(self) -> bool:
        return any(tensor._version != version for tensor, version in self.inputs)

    def _refusal(self, difference: str) -> InputError:
        return InputError(
            "Repeated blocks must compute the same numbers when they are called twice. They are "
            "called twice because a sample's activations don't fit into memory. In the second "
            f"call of a {type(self.block).__name__}, {difference}. Raise compute.memory_mb, or "
            "shorten the sample.",
            code="gradients.second_call",
        )


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each tensor's storage, by the storage's address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _fingerprint(tensor: Tensor) -> int | Tensor | None:
    """Return a fingerprint of a tensor's values, or None if they need not be compared."""
    tensor = tensor.detach()
    is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    if tensor.dtype in _NOT_COMPARED or (is_index and tensor.ndim == 0):
        return None
    return _checksum(tensor) if tensor.device.type == "cpu" else _sums(tensor)


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of a CPU tensor's bits, which are the same in two calls of a block."""
    for i, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(i, 0, min(1, tensor.shape[i]))
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    values = tensor.permute(order).resolve_conj().resolve_neg().contiguous()
    bits: Any = values.flatten().view(torch.uint8).numpy()
    return zlib.crc32(bits)


def _sums(tensor: Tensor) -> Tensor:
    """Return the sum and the norm of a tensor for each index of the last dimension.

    Entries may differ in scale along this dimension, so one sum would hide small differences.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = (values if values.is_floating_point() else values.double()).reshape(
        -1, *values.shape[-1:]
    )
    dtype = torch.promote_types(values.dtype, torch.float32)
    norms = torch.linalg.vector_norm(values, dim=0, dtype=dtype)
    return torch.stack([values.sum(dim=0, dtype=dtype), norms])


def _agree(new: int | Tensor | None, old: int | Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether two fingerprints are equal, up to rounding if they are sums and norms."""
    if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return bool(new == old)
    is_float = dtype.is_floating_point or dtype.is_complex
    allowed = _ROUNDING * (torch.finfo(dtype).eps if is_float else 0) * old.abs().sum(dim=0)
    is_close = (new - old).abs() <= allowed.nan_to_num(math.inf)
    return bool((is_close | (new == old) | (new.isnan() & old.isnan())).all())


def _never(packed: None) -> Tensor:
    raise AssertionError("the graph of a second call is not used")
