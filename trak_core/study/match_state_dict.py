"""Match the weights in a checkpoint with those of a model by name.

A model can be trained within a wrapper, which adds a part to the names of weights: data parallelism
adds ``module.``, torch.compile adds ``_orig_mod.``, and Lightning adds the name of an attribute.
A checkpoint fits if its names are those of the model after such parts are removed. It is an error
if the checkpoint contains weights that the model lacks, or lacks weights of the model.
"""

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.study.hugging_face_weights import convert_weights

# Three attempts are made to match names. The first removes nothing. The second removes the parts
# that FSDP, torch.compile and activation checkpointing add to names. The third also removes
# `module`, which data parallelism adds, but which can also be the name of a submodule.
_WRAPPERS = "_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module"
_WRAPPER_PATTERNS = [
    re.compile(rf"(?<![^.])({names})\.") for names in ("(?!)", _WRAPPERS, f"{_WRAPPERS}|module")
]
_MAX_PREFIXES = 4  # The number of prefixes to try that not all names share.


def misfits_of(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], unread: Container[str] = ()
) -> dict[str, list[str]]:
    """Compare the state dict of a checkpoint (``state``) with that of the model (``own``).

    Keys in ``unread`` may be missing from the checkpoint. If weights are tied in the model, the
    checkpoint must contain at least one of them.

    Returns:
        The keys that do not fit, by the kind of the difference, such as "of another shape".
    """
    both = [key for key in own if key in state]
    stored = {_location(own[key]) for key in both if own[key].numel()}
    misfits = {
        "missing from the checkpoint": [
            k for k in own if k not in state and _location(own[k]) not in stored and k not in unread
        ],
        "unknown to the model": [k for k in state if k not in own],
        "of another shape": [
            f"{k} {tuple(state[k].shape)} for {tuple(own[k].shape)}"
            for k in both
            if state[k].shape != own[k].shape
        ],
        "of another type": [
            f"{k} {state[k].dtype}, {state[k].layout} for {own[k].dtype}"
            for k in both
            if not _fits_type(state[k], own[k])
        ],
    }
    return {kind: keys for kind, keys in misfits.items() if keys}


def _location(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's location in memory, which is the same for tied weights."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


def _fits_type(stored: Tensor, own: Tensor) -> bool:
    if stored.layout is not torch.strided or stored.is_complex() > own.is_complex():
        return False
    # 8-bit floats are quantized weights, whose values are meaningless without their scales.
    if stored.is_floating_point() and stored.dtype.itemsize == 1:
        return False
    return stored.is_floating_point() or not own.is_floating_point()


def shared_prefixes(names: Iterable[str]) -> list[str]:
    """Return the prefixes that all names share, shortest first. A prefix is empty or ends in a dot.

    Example:
        >>> shared_prefixes(["module.net.weight", "module.net.bias"])
        ['', 'module.', 'module.net.']
    """
    # ruff: ignore[os-path-commonprefix] -- the prefix is cut at the dots below
    common = os.path.commonprefix(list(names))
    return ["", *(common[: end + 1] for end, letter in enumerate(common) if letter == ".")]


def _prefixes(names: Iterable[str], own: Container[str]) -> Iterator[str]:
    """Yield prefixes whose removal may turn names into those of the model (``own``).

    First come the prefixes that all names share. Then come the prefixes that most frequently
    precede one of the model's names.
    """
    yield from shared_prefixes(names)
    before_own = Counter(
        name[: end + 1]
        for name in names
        for end, letter in enumerate(name)
        if letter == "." and name[end + 1 :] in own
    )
    yield from (prefix for prefix, _ in before_own.most_common(_MAX_PREFIXES))


class Fit(NamedTuple):
    """The weights of a checkpoint that fits a model, under the names that the model uses."""

    weights: dict[str, Tensor]
    # Maps names in the file to names in the model. None if transformers converted the weights.
    names: dict[str, str] | None
    notices: Sequence[str]  # Sentences to print, about the changes that were necessary.


def match_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], source: str, within: str = ""
) -> Fit:
    """Return a checkpoint's weights under the names that they have in a model.

    If the names in the checkpoint differ from those in the model, three changes are tried. First, a
    prefix is removed from the checkpoint's names. Second, the parts that FSDP, torch.compile,
    activation checkpointing and data parallelism add to names are removed from the names of both,
    unless two names would become equal. Third, transformers converts the weights. Messages begin
    with ``source``. ``within`` contains the keys that lead to ``state`` in its file, joined by
    dots.

    Raises:
        InputError: If the names still differ. The message lists the differences in the closest
            attempt. If all weights under some prefix fit, the message suggests using only these.
    """
    own = model.state_dict()
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    unread = {f"{norm}.num_batches_tracked".lstrip(".") for norm in norms}
    attempts: list[tuple[str, dict[str, list[str]]]] = []  # (prefix, misfits without it)
    fitting_parts: list[str] = []
    for wrappers in _WRAPPER_PATTERNS:
        bare, own_bare = ({wrappers.sub("", key): key for key in keys} for keys in (state, own))
        if len(bare) < len(state) or len(own_bare) < len(own):
            continue
        for prefix in _prefixes(bare, own_bare):
            names = {
                key: own_bare.get(name.removeprefix(prefix), name.removeprefix(prefix))
                for name, key in bare.items()
                if name.startswith(prefix)
            }
            written = (p for p in shared_prefixes(names) if wrappers.sub("", p) == prefix)
            prefix = next(written, prefix)
            weights = {names[key]: state[key] for key in names}
            misfits = misfits_of(weights, own, unread)
            if len(names) < len(state):
                fitting_parts += [] if misfits else [prefix]
                misfits[f"not under {prefix}"] = [key for key in state if key not in names]
            if not misfits:
                removed = {part for key in (*state, *own) for part in wrappers.findall(key)}
                parts = ", ".join(sorted(removed))
                notices = {
                    f"all keys begin with `{prefix}`, which is removed to fit the model.": prefix,
                    f"wrappers added {parts} to the keys. These parts were ignored.": parts,
                }
                return Fit(weights, names, [text for text, is_so in notices.items() if is_so])
            attempts.append((prefix, misfits))
        if fitting_parts:
            break
    prefix, misfits = min(attempts, key=lambda attempt: _count(attempt[1]))
    if "of another type" not in misfits:
        for start in shared_prefixes(state):
            known = convert_weights(model, {key.removeprefix(start): v for key, v in state.items()})
            if known and not (known[1] or misfits_of(known[0], own)):
                notice = "transformers converted the weights to the model's current names."
                return Fit(known[0], None, [notice])
            if known and _count(known[1]) < _count(misfits):
                prefix, misfits, fitting_parts = "", known[1], []
    remedy = "Check whether make_model() builds the model that was saved."
    if fitting_parts:
        settings = (f"`state_dict: {f'{within}.{part}'.strip('.')}`" for part in fitting_parts)
        remedy = f"To use only keys that fit, set {' or '.join(settings)} for the checkpoint."
    raise InputError(
        f"{source}: the checkpoint's keys{f', without {prefix},' if prefix else ''} must be "
        f"those of the model. Found keys {in_words(misfits)}. {remedy}",
        code="study.checkpoint_keys",
    )


def _count(misfits: Mapping[str, Sequence[str]]) -> int:
    return sum(map(len, misfits.values()))


def in_words(misfits: Mapping[str, Sequence[str]]) -> str:
    """Return the result of ``misfits_of`` as a text for an error message."""
    return "; ".join(f"{kind}: {listed(keys)}" for kind, keys in misfits.items())
