"""Match the weights of a checkpoint with those of a model, by their names.

Training puts more into names than a model has: wrappers, the attribute of a larger module. Weights
fit if the names are the model's without that, one for one; a file with more than them is refused.
"""

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.study.hugging_face_weights import renamed

# What wrappers put into names, in the order in which it is taken off: nothing; what FSDP,
# torch.compile and activation checkpointing put there; what data parallelism does too, which a
# part of a model may be called itself.
_OF_WRAPPERS = "_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module"
_WRAPPERS_OF_NAMES = [
    re.compile(rf"(?<![^.])({names})\.")
    for names in ("(?!)", _OF_WRAPPERS, f"{_OF_WRAPPERS}|module")
]
# Prefixes of a part of the keys that are tried, those of the most keys of the model first.
_PREFIXES = 4


def misfits_of(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], unread: Container[str] = ()
) -> dict[str, list[str]]:
    """Return the kinds of differences between a checkpoint and a model, with the keys of each.

    Keys of the model's ``own`` that are ``unread`` in evaluation mode need not be there.
    """
    both = [key for key in own if key in state]
    stored = {_place(own[key]) for key in both if own[key].numel()}
    misfits = {
        "missing in the checkpoint": [
            k for k in own if k not in state and _place(own[k]) not in stored and k not in unread
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
            if not _is_of_type(state[k], own[k])
        ],
    }
    return {kind: keys for kind, keys in misfits.items() if keys}


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies, numbers or none: tied weights lie in one place."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


def _is_of_type(stored: Tensor, own: Tensor) -> bool:
    """Return whether a tensor's numbers are a weight's: quantized ones would pass for floats."""
    if stored.layout is not torch.strided or stored.is_complex() > own.is_complex():
        return False
    # Numbers of eight bits or fewer are quantized too, and mean nothing without their scales.
    if stored.is_floating_point() and stored.dtype.itemsize == 1:
        return False
    return stored.is_floating_point() or not own.is_floating_point()


def shared_prefixes(names: Iterable[str]) -> list[str]:
    """Return the prefixes that all names share, the empty one first, then each with a dot more.

    Data parallelism puts ``module.`` before every key, torch.compile ``_orig_mod.``, Lightning the
    name of an attribute, mostly ``model.``.
    """
    # ruff: ignore[os-path-commonprefix] -- letter by letter, cut at the dots
    common = os.path.commonprefix(list(names))
    return ["", *(common[: end + 1] for end, letter in enumerate(common) if letter == ".")]


def _prefixes(names: Iterable[str], own: Container[str]) -> Iterator[str]:
    """Yield the prefixes that all names share, then those before the most names of a model's."""
    yield from shared_prefixes(names)
    yield from (
        prefix
        for prefix, _ in Counter(
            name[: end + 1]
            for name in names
            for end, letter in enumerate(name)
            if letter == "." and name[end + 1 :] in own
        ).most_common(_PREFIXES)
    )


class Fit(NamedTuple):
    """Weights that fit a model.

    ``weights`` are by the model's names. ``names`` maps the file's names to these; it is None where
    transformers renamed them. ``told`` are sentences for the log.
    """

    weights: dict[str, Tensor]
    names: dict[str, str] | None
    told: Sequence[str]


def fit_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str, within: str = ""
) -> Fit:
    """Return how a state fits a model; ``within`` are the keys that lead to it in its file.

    A prefix that all names share is taken off where they fit the model without it. What FSDP,
    torch.compile, activation checkpointing and data parallelism put into names is taken off the
    state's and the model's, as long as that leaves each side's names different. An ``InputError``
    lists the keys that differ in the way that fits best, and says of what part all would fit.
    """
    own = model.state_dict()
    norms = [n for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    unread = {f"{norm}.num_batches_tracked".lstrip(".") for norm in norms}
    # Prefixes, and what misfits without each. A part of the model itself may be called `module`, so
    # that unchanged keys are tried first, and are taken if they fit best.
    tried: list[tuple[str, dict[str, list[str]]]] = []
    alone: list[str] = []  # prefixes of all that the model has
    for wrappers in _WRAPPERS_OF_NAMES:
        bare, own_bare = ({wrappers.sub("", key): key for key in keys} for keys in (state, own))
        if len(bare) < len(state) or len(own_bare) < len(own):
            continue  # what tells keys apart is no wrapper's
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
                alone += [] if misfits else [prefix]
                misfits[f"not under {prefix}"] = [key for key in state if key not in names]
            if not misfits:
                removed = {n for key in (*state, *own) for n in wrappers.findall(key)}
                return Fit(weights, names, _told(prefix, removed))
            tried.append((prefix, misfits))
        if alone:
            break
    prefix, misfits = min(tried, key=lambda attempt: _count(attempt[1]))
    if "of another type" not in misfits:
        for start in shared_prefixes(state):
            known = renamed(model, {key.removeprefix(start): v for key, v in state.items()})
            if known and not (known[1] or misfits_of(known[0], own)):
                told = "transformers gives the weights the names that the model has now."
                return Fit(known[0], None, [told])
            if known and _count(known[1]) < _count(misfits):
                prefix, misfits, alone = "", known[1], []
    remedy = "Does make_model() build the model that was saved?"
    if alone:
        ways = " or ".join(f"`state_dict: {f'{within}.{start}'.strip('.')}`" for start in alone)
        remedy = f"The keys under {' or '.join(alone)} alone fit; a config takes them by {ways}."
    raise InputError(
        f"{source}: the checkpoint's keys{f', without {prefix}' if prefix else ''} must be "
        f"those of the model. Found {in_words(misfits)}. {remedy}",
        code="study.checkpoint_keys",
    )


def _count(misfits: Mapping[str, Sequence[str]]) -> int:
    return sum(map(len, misfits.values()))


def _told(prefix: str, wrappers: Iterable[str]) -> list[str]:
    names = ", ".join(sorted(wrappers))
    return [
        *[f"all keys begin with `{prefix}`, which is taken off to fit the model's."] * bool(prefix),
        *[f"{names} within keys come from wrappers and don't count."] * bool(names),
    ]


def in_words(misfits: Mapping[str, Sequence[str]]) -> str:
    """Return what ``misfits_of`` returned as text."""
    return "; ".join(f"{kind}: {listed(keys)}" for kind, keys in misfits.items())
