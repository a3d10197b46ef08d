"""Fit the weights of a checkpoint to a model."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.spec import ADAPTER_CONFIG
from trak_core.study.hugging_face_weights import Adapter, renamed
from trak_core.study.unset_weights import built_without_draws
from trak_core.study.weight_files import (
    WRAPPERS,
    is_safetensors,
    read_shapes,
    read_tensors,
    stream_tensors,
    weight_files,
)

_MUST = "a checkpoint must be a state dict saved by torch.save, or safetensors"
_REMEDY = "Save `model.state_dict()` and use that file."
# Entries that are checked at a time.
_PIECE = 2**20
# How modules take weights: copies, and torch's norms, which only add what old files lack.
_PLAIN_LOADS = {
    nn.Module._load_from_state_dict,
    nn.BatchNorm1d._load_from_state_dict,
    nn.InstanceNorm1d._load_from_state_dict,
}


def _is_state_dict(saved: object) -> bool:
    return isinstance(saved, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in saved.items()
    )


def _state_dict(saved: Any, path: Path) -> dict[str, Tensor]:
    """Take the state dict out of what a file holds."""
    for wrapper in WRAPPERS:
        if isinstance(saved, dict) and isinstance(saved.get(wrapper), dict):
            saved = saved[wrapper]
    if _is_state_dict(saved):
        return saved
    entries = saved if isinstance(saved, dict) else {}
    # Not `if value`: a tensor has no truth.
    parts = {key: value for key, value in entries.items() if isinstance(value, dict) and value}
    within = [key for key, value in parts.items() if _is_state_dict(value)]
    remedy = _REMEDY
    if within:
        name = path.with_stem(f"{path.stem}-weights").name
        call = f"torch.save(torch.load({str(path)!r})[{within[0]!r}], {name!r})"
        remedy = f"Save the part that is one by itself: `{call}`."
    raise InputError(
        f"{path}: a checkpoint must be a state dict (names to tensors), possibly under one of "
        f"the keys {', '.join(WRAPPERS)}. Found {type(saved).__name__} with "
        f"{', '.join(map(str, [*entries][:5])) or 'no keys'}. {remedy}",
        code="study.state_dict",
    )


def read_state_dict(checkpoint: Path) -> tuple[dict[str, Tensor], str]:
    """Read the weights of a checkpoint, on the CPU.

    It is a state dict written by ``torch.save``, a ``.safetensors`` file, a Hugging Face folder,
    sharded or not, or a folder of an adapter of PEFT's; anything else is an ``InputError``.

    Returns:
        Names to tensors; and the SHA-256 of the files that decide the numbers, in order. An
        adapter's config, or an index, comes before the weights.
    """
    files, config = weight_files(checkpoint)
    digest, state = hashlib.sha256(), {}
    if config:
        digest.update(config.read_bytes())
    for path in files:
        _add_shard(state, read_tensors(path, _MUST, _REMEDY, digest.update), path)
    return state, digest.hexdigest()


def _add_shard(state: dict[str, Tensor], saved: Any, path: Path) -> None:
    """Add one more file's weights to ``state``; a file of an older save would repeat some."""
    shard = _state_dict(saved, path)
    twice = sorted(state.keys() & shard.keys())
    if twice:
        raise InputError(
            f"{path}: each weight must be in one file of a checkpoint folder. Found in another "
            f"one too: {listed(twice)}. Save the checkpoint again, into an empty folder.",
            code="study.checkpoint_shards",
        )
    state.update(shard)


def _misfits(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return in words what keeps a checkpoint from fitting a model, with the keys."""
    both = [key for key in own if key in state]
    stored = {_place(own[key]) for key in both if own[key].numel()}
    misfits = {
        "missing in the checkpoint": [
            k for k in own if k not in state and _place(own[k]) not in stored
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


def _fitting(
    model: nn.Module, state: Mapping[str, Tensor], source: str
) -> tuple[str | None, dict[str, Tensor]]:
    """Return the prefix without which a state fits a model, and the state without it.

    No prefix, None, is that of a state which transformers had to give the model's names.
    """
    own = model.state_dict()
    stripped = {
        prefix: {key.removeprefix(prefix): value for key, value in state.items()}
        for prefix in shared_prefixes(state)
    }
    all_misfits = {prefix: _misfits(fitting, own) for prefix, fitting in stripped.items()}
    # A part of the model itself may be called `module`: keys as they are, if those fit best.
    prefix = min(stripped, key=lambda prefix: sum(map(len, all_misfits[prefix].values())))
    misfits = all_misfits[prefix]
    if misfits and "of another type" not in misfits:
        for weights in stripped.values():
            known = renamed(model, weights)
            if known and not (known[1] or _misfits(known[0], own)):
                return None, known[0]
            if known and sum(map(len, known[1].values())) < sum(map(len, misfits.values())):
                prefix, misfits = "", known[1]
    if misfits:
        raise InputError(
            f"{source}: the checkpoint's keys{f', without {prefix}' if prefix else ''} must be "
            f"those of the model. Found {_in_words(misfits)}. Does make_model() build the model "
            "that was saved?",
            code="study.checkpoint_keys",
        )
    return prefix, stripped[prefix]


def _in_words(misfits: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{kind}: {listed(keys)}" for kind, keys in misfits.items())


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put weights into ``model``, and the model into evaluation mode.

    Every parameter and buffer of the model must be there, with its shape, and nothing else; tied
    parameters need to be there once, and must be equal otherwise. A prefix that every key has, and
    without which they fit, is taken off; a line on standard output says so. Weights must be finite.
    An ``InputError`` lists what doesn't fit, and names the ``source`` of the weights.
    """
    prefix, fitting = _fitting(model, state, source)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_finite({k: v for k, v in fitting.items() if k in parameters}, source)
    _check_tied(parameters, fitting, source)
    _tell_prefix(prefix, source)
    model.load_state_dict(fitting, strict=False)
    model.eval()


def _tell_prefix(prefix: str | None, source: str) -> None:
    if prefix is None:
        print(f"{source}: transformers gives the weights the names that the model has now.")
    elif prefix:
        print(f"{source}: all keys begin with `{prefix}`, which is taken off to fit the model's.")


def _check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    _refuse_not_finite([key for key, value in weights.items() if not _is_finite(value)], source)


def _is_finite(values: Tensor) -> bool:
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return True
    # The least and the greatest: nearly ten times as fast as torch.isfinite.
    parts = values.flatten().split(_PIECE) if values.numel() else ()
    return all(bool(torch.stack(part.aminmax()).isfinite().all()) for part in parts)


def _refuse_not_finite(bad: Sequence[str], source: str) -> None:
    if bad:
        raise InputError(
            f"{source}: a checkpoint's weights must be finite. Found NaN or infinity in "
            f"{listed(bad)}. Take an earlier checkpoint, or train again.",
            code="study.checkpoint_finite",
        )


def _check_tied(
    parameters: Mapping[str, Tensor], fitting: Mapping[str, Tensor], source: str
) -> None:
    """Refuse two weights for one parameter: the model would silently have the last."""
    first: dict[int, str] = {}
    differing = []
    for key, own in parameters.items():
        if key not in fitting:
            continue
        other = first.setdefault(id(own), key)
        if other != key and not torch.equal(*(fitting[k].to(own.dtype) for k in (key, other))):
            differing += [other, key]
    _refuse_untied(differing, source)


def _refuse_untied(differing: Sequence[str], source: str) -> None:
    if differing:
        raise InputError(
            f"{source}: weights of parameters that the model ties must be equal. Found different "
            f"ones in {listed(sorted({*differing}))}. Let make_model() tie what was tied in "
            "training, and nothing else.",
            code="study.checkpoint_tied",
        )


def model_to_load(make_model: Callable[[], nn.Module], checkpoint: Path) -> nn.Module:
    """Return the model that is to get a checkpoint's weights.

    Weights that it will get are not drawn first, where that decides no number.
    """
    # An adapter's files have a few of the weights. A model's own way to load may leave some out.
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        model = built_without_draws(make_model)
        if model is not None and _loads_plainly(model):
            return model
    return make_model()


def load_checkpoint(model: nn.Module, checkpoint: Path) -> dict[str, str]:
    """Put the weights of a file or folder into ``model``, and the model into evaluation mode.

    ``read_state_dict`` says what is read, ``load_state_dict`` what fits. A folder of an adapter of
    PEFT's gives the active adapter of a PeftModel its weights: every one must be there, with its
    shape, and nothing else; and the model must have the settings that it was saved with, without
    which its weights mean something else. The base's stay as they are.

    Returns:
        What tells these weights from others: ``sha256``, of the files (see ``read_state_dict``).
        An adapter's files hold a few weights of many: its ``model_sha256`` is of all that the
        model has with it, so that files made on different bases are never taken together.
    """
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    if not is_adapter and _loads_plainly(model):
        files, index = weight_files(checkpoint)
        if all(map(is_safetensors, files)):
            streamed = _stream(model, files, index, str(checkpoint))
            if streamed is not None:
                return {"sha256": streamed}
    state, sha256 = read_state_dict(checkpoint)
    if not is_adapter:
        load_state_dict(model, state, str(checkpoint))
        return {"sha256": sha256}
    adapter = _fitting_adapter(model, state, checkpoint)
    _check_finite(state, str(checkpoint))
    adapter.put(state)
    model.eval()
    # Modules may keep what is no tensor there.
    weights = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return {"sha256": sha256, "model_sha256": state_dict_sha256(weights)}


def _loads_plainly(model: nn.Module) -> bool:
    """Whether loading a model's weights is copying them, each to the tensor of its name."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    own_way = type(model).load_state_dict is not nn.Module.load_state_dict
    return (
        not own_way
        and model.state_dict().keys() <= named.keys()
        and not any(
            module._state_dict_hooks
            or module._load_state_dict_pre_hooks
            or module._load_state_dict_post_hooks
            or type(module)._load_from_state_dict not in _PLAIN_LOADS
            or "_load_from_state_dict" in vars(module)
            for module in model.modules()
        )
    )


def _stream(model: nn.Module, files: Sequence[Path], index: Path | None, source: str) -> str | None:
    """Return the SHA-256 of ``read_state_dict``; do what ``load_state_dict`` does.

    Files of safetensors are read a tensor at a time: no weights are held beside the model's own.
    None, and nothing is done, where transformers must rename them.
    """
    shapes: dict[str, Tensor] = {}
    for path in files:
        _add_shard(shapes, read_shapes(path, _MUST, _REMEDY), path)
    prefix, _ = _fitting(model, _without_numbers(shapes), source)
    if prefix is None:
        return None
    own = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    parameters = {
        f"{prefix}{name}": parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    # A tied parameter is read once; its others are compared.
    first = {id(p): key for key, p in reversed(parameters.items()) if key in shapes}
    others = {key: first[id(p)] for key, p in parameters.items() if first.get(id(p), key) != key}
    places = {key: tensor for key, tensor in own.items() if key not in others}
    ties: dict[str, Tensor] = {}
    bad: list[str] = []
    digest = hashlib.sha256(index.read_bytes() if index else b"")
    for path in files:
        for key, values in stream_tensors(path, _MUST, _REMEDY, digest.update, shapes, places):
            if key in parameters and not _is_finite(values):
                bad.append(key.removeprefix(prefix))
            if key in others:
                ties[key] = values
            elif values is not own[key]:
                own[key].copy_(values)
    _refuse_not_finite(bad, source)
    _refuse_untied(
        [
            key.removeprefix(prefix)
            for tied, values in ties.items()
            if not torch.equal(values.to(own[tied]), own[tied])
            for key in (others[tied], tied)
        ],
        source,
    )
    _tell_prefix(prefix, source)
    model.eval()
    return digest.hexdigest()


def check_checkpoint(model: nn.Module, checkpoint: Path) -> bool:
    """Refuse what ``load_checkpoint`` would, except numbers and checksums, which stay unread.

    Returns:
        Whether transformers must rename its weights, for which more than one copy is held.
    """
    state = weights_without_numbers(checkpoint)
    if state is None:
        return False
    if (checkpoint / ADAPTER_CONFIG).is_file():
        _fitting_adapter(model, state, checkpoint)
        return False
    prefix, _ = _fitting(model, _without_numbers(state), str(checkpoint))
    return prefix is None


def weights_without_numbers(checkpoint: Path) -> dict[str, Tensor] | None:
    """Return what ``read_state_dict`` reads, with numbers that stay unread.

    None for a file of torch before 1.6, which can only be read whole.
    """
    state: dict[str, Tensor] = {}
    for path in weight_files(checkpoint)[0]:
        saved = read_shapes(path, _MUST, _REMEDY)
        if saved is None:
            return None
        _add_shard(state, saved, path)
    return state


def _without_numbers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.to("meta") for key, value in state.items()}


def _fitting_adapter(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> Adapter:
    """Return the model's adapter, which the weights fit."""
    adapter = Adapter.of(model, folder)
    settings, of_keys = adapter.other_settings(folder / ADAPTER_CONFIG)
    misfits = _misfits(state, adapter.weights(state))
    settings += of_keys if misfits else []
    if settings:
        misfits["of another setting"] = settings
    if misfits:
        raise InputError(
            f"{folder}: an adapter's weights and settings must be those of the PeftModel "
            f"that make_model() returns. Found {_in_words(misfits)}. Build it with the config of "
            "the training, `PeftConfig.from_pretrained(folder)`, on the same base.",
            code="study.adapter_settings",
        )
    return adapter


def state_dict_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights in memory: names, dtypes, shapes and bytes, in order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()
