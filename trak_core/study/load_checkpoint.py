"""Read the weights of a checkpoint, and load them into a model."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.runtime.progress import print_line
from trak_core.settings import ADAPTER_CONFIG
from trak_core.study.hugging_face_weights import Adapter, config_notice
from trak_core.study.match_state_dict import Fit, in_words, match_state_dict, misfits_of
from trak_core.study.weight_files import (
    WRAPPERS,
    is_state_dict,
    read_tensors,
    state_dicts,
    weight_files,
)

_MUST = "a checkpoint must be a state dict saved by torch.save, or safetensors"
_REMEDY = "Copy it again, or save `model.state_dict()` and use that file."
_PIECE_BYTES = 2**26  # The approximate number of bytes that are copied from each memory map.
# Methods with which modules of torch load their weights. They copy each weight unchanged, and those
# of norm layers can also add entries that old files lack. Any other method may change the weights.
_PLAIN_LOADS = {
    nn.Module._load_from_state_dict,
    nn.BatchNorm1d._load_from_state_dict,
    nn.InstanceNorm1d._load_from_state_dict,
}


class Weights(NamedTuple):
    """A state dict that was read from a checkpoint."""

    state: dict[str, Tensor]
    within: str  # The keys that lead to ``state`` in the file, joined by dots.
    notice: str  # A sentence that lists other state dicts in the file, or "".


def _default_part(saved: Any, path: Path) -> Weights:
    """Return the state dict in a loaded file, at the top level or under keys in ``WRAPPERS``."""
    parts, within = dict(state_dicts(saved)), []
    state = saved
    for wrapper in WRAPPERS:
        if isinstance(state, dict) and isinstance(state.get(wrapper), dict):
            state = state[wrapper]
            within.append(wrapper)
    name = ".".join(within)
    others = [f"`{other}`" for other in parts if other != name]
    if is_state_dict(state):
        notice = (
            f"the weights under `{name}` are used. The file also contains weights under "
            f"{listed(others)}. To use those, set the checkpoint's `state_dict` in the config, or "
            "pass the loaded state dict to `Attributor`."
        )
        return Weights(state, name, notice if others else "")
    remedy = _REMEDY
    if parts:
        choices = " or ".join(f"`state_dict: {part}`" for part in parts)
        remedy = f"Set the checkpoint's {choices} in the config, or pass it to `Attributor`."
    entries = saved if isinstance(saved, dict) else {}
    raise InputError(
        f"{path}: a checkpoint must be a state dict (a dict from names to tensors), or contain one "
        f"under the keys {', '.join(WRAPPERS)}. Found {type(saved).__name__} with "
        f"{', '.join(map(str, [*entries][:5])) or 'no keys'}. {remedy}",
        code="study.state_dict",
    )


def read_weights(checkpoint: Path, part: str | None = None, digest: Any = None) -> Weights:
    """Return the weights of a checkpoint as memory-mapped tensors on the CPU.

    Args:
        checkpoint: A file in which ``torch.save`` stored a state dict, a ``.safetensors`` file, or
            a folder that transformers or PEFT saved. The weights can be in several files.
        part: The state dict to read if a file contains several: the keys that lead to it, joined by
            dots. A prefix can follow, to read only the weights whose names begin with it. None
            reads the state dict at the top level or under a key that training frameworks use.
        digest: A hash object of hashlib, or None. It is updated with the config of an adapter or
            the index of a checkpoint in several files, and then with the files of weights.
    """
    state, within, notice = dict[str, Tensor](), part or "", ""
    files, config = weight_files(checkpoint)
    if digest is not None and config is not None:
        digest.update(config.read_bytes())
    for path in files:
        saved = read_tensors(path, _MUST, _REMEDY, digest)
        if part is None:
            shard, within, notice = _default_part(saved, path)
        else:
            shard = {
                f"{name}.{key}" if name else key: value
                for name, weights in state_dicts(saved)
                for key, value in weights.items()
            }
        twice = sorted(state.keys() & shard.keys())
        if twice:
            raise InputError(
                f"{path}: each weight must be in only one file of a checkpoint folder. Found "
                f"{listed(twice)} in two files. Save the checkpoint again, into an empty folder.",
                code="study.checkpoint_shards",
            )
        state.update(shard)
    start = f"{part}." if part else ""
    chosen = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    if part and not chosen:
        raise InputError(
            f"{checkpoint}: the setting `state_dict` must contain the keys that lead to the "
            f"weights in the file, joined by dots. Found no weights under {part}. The file "
            f"contains weights under {listed(sorted({key.split('.')[0] for key in state}))}.",
            code="study.no_such_part",
        )
    unusual = [f"{key}, {kind}" for key, value in chosen.items() if (kind := _unusual_kind(value))]
    if unusual:
        raise InputError(
            f"{checkpoint}: weights must be plain tensors of numbers. Found {listed(unusual)}. "
            "Save the `state_dict()` of the trained model with plain floating-point tensors, which "
            "are neither sharded nor quantized.",
            code="study.tensor_file",
        )
    return Weights(chosen, within, notice)


def _unusual_kind(value: Tensor) -> str:
    """Return "" for a plain tensor, and else its kind, such as "DTensor" or "quantized"."""
    if type(value) not in {Tensor, nn.Parameter}:
        return type(value).__name__
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
    return next((kind for kind, is_so in kinds.items() if is_so), "")


def load_state_dict(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights into ``model``, and put it into evaluation mode.

    ``state`` must contain all parameters and buffers of the model and nothing else, with the same
    shapes and finite values. If parameters are tied, their weights must be equal, and all but one
    may be missing. The buffer ``num_batches_tracked`` of norm layers may be missing, because it is
    not used in evaluation mode. ``match_state_dict`` documents how names may differ. Messages begin
    with ``source``, which is the checkpoint's path.
    """
    fit = match_state_dict(model, state, source)
    _copy_weights(model, [fit.weights], fit, source)


def _copy_weights(
    model: nn.Module, pieces: Iterable[Mapping[str, Tensor]], fit: Fit, source: str
) -> None:
    """Check the weights in ``pieces``, which together are ``fit.weights``, and load each piece."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_tied(parameters, fit.weights, source)
    for piece in pieces:
        _check_finite({k: v for k, v in piece.items() if k in parameters}, source)
        model.load_state_dict(piece, strict=False)
    model.eval()
    for notice in fit.notices:
        print_line(f"{source}: {notice}")


def _check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    bad = [key for key, value in weights.items() if not _is_finite(value)]
    if bad:
        raise InputError(
            f"{source}: a checkpoint's weights must be finite. Found NaN or infinity in "
            f"{listed(bad)}. Use an earlier checkpoint, or train again.",
            code="study.checkpoint_finite",
        )


def _is_finite(values: Tensor) -> bool:
    values = torch.view_as_real(values) if values.is_complex() else values
    # If any entry is NaN, so are the minimum and the maximum. Computing them takes a tenth of the
    # time of applying torch.isfinite to all entries.
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def _check_tied(
    parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], source: str
) -> None:
    first: dict[int, str] = {}
    differing = set[str]()
    for key, parameter in parameters.items():
        if key not in weights:
            continue
        other = first.setdefault(id(parameter), key)
        if other != key:
            values, others = (weights[k].to(parameter.dtype) for k in (key, other))
            differing |= set() if torch.equal(values, others) else {other, key}
    if differing:
        raise InputError(
            f"{source}: weights of parameters that the model ties must be equal. Found different "
            f"weights in {listed(sorted(differing))}. Let make_model() tie the parameters that "
            "were tied in training, and no others.",
            code="study.checkpoint_tied",
        )


def load_checkpoint(model: nn.Module, checkpoint: Path, part: str | None = None) -> dict[str, str]:
    """Load the weights in a file or folder into ``model``, and put it into evaluation mode.

    ``read_weights`` documents ``checkpoint`` and ``part``, and ``load_state_dict`` documents
    which weights fit. If the folder contains an adapter, ``model`` must be a PeftModel. Its active
    adapter, which gets the weights, must have the same keys, shapes and settings.

    Returns:
        The hash of the files as ``sha256``. For an adapter, also the hash of all weights in the
        model as ``model_sha256``, because the files do not contain the base model's weights.
    """
    digest, source, before = hashlib.sha256(), str(checkpoint), _stamps(checkpoint)
    weights = read_weights(checkpoint, part, digest)
    sha256 = digest.hexdigest()
    for notice in filter(None, (weights.notice, config_notice(model, checkpoint))):
        print_line(f"Notice: {checkpoint}: {notice}")
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        fit = match_state_dict(model, weights.state, source, weights.within)
        pieces = [fit.weights]
        if fit.names is not None and _loads_plainly(model):
            pieces = _pieces(checkpoint, part, fit.names, weights.state, before)
        _copy_weights(model, pieces, fit, source)
        return {"sha256": sha256}
    adapter = _fitting_adapter(model, weights.state, checkpoint)
    _check_finite(weights.state, source)
    adapter.load(weights.state)
    model.eval()
    # A module's get_extra_state() can add objects that are not tensors to the state dict.
    tensors = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return {"sha256": sha256, "model_sha256": state_dict_sha256(tensors)}


def _pieces(
    checkpoint: Path,
    part: str | None,
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
    before: list[tuple[int, ...]],
) -> Iterator[dict[str, Tensor]]:
    """Yield a checkpoint's weights in pieces, to save memory while they are copied into a model.

    The part of a memory-mapped file that has been read stays in memory until the map is closed.
    With one map for the whole file, the weights would be in memory twice. Therefore, each piece is
    read through a new map. ``names`` maps names of weights in the file to names in the model, and
    ``state`` is the file's state dict. ``before`` is the result of ``_stamps`` before the files
    were hashed. An error is raised if the files have changed since then.
    """
    keys, n_bytes = list[str](), 0
    for i, key in enumerate(names, 1):
        keys.append(key)
        n_bytes += state[key].nbytes
        if i == len(names) or n_bytes >= _PIECE_BYTES:
            mapped = read_weights(checkpoint, part).state
            yield {names[k]: mapped[k] for k in keys}
            keys, n_bytes = [], 0
    if _stamps(checkpoint) != before:
        raise InputError(
            f"{checkpoint}: a checkpoint must not change while it is being read, but it was "
            "replaced. Run the job again.",
            code="study.checkpoint_replaced",
        )


def _stamps(checkpoint: Path) -> list[tuple[int, ...]]:
    """Return the inode, size and times of each file of weights, to notice if a file changes."""
    stats = [path.stat() for path in weight_files(checkpoint)[0]]
    return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


def _loads_plainly(model: nn.Module) -> bool:
    """Return whether ``model.load_state_dict`` copies all weights unchanged.

    Hooks and overridden methods could rename or change the weights.
    """
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return (
        type(model).load_state_dict is nn.Module.load_state_dict
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


def check_checkpoint(
    model: nn.Module, checkpoint: Path, part: str | None = None
) -> tuple[bool, str]:
    """Check whether a checkpoint fits a model, before jobs load it.

    These are the checks of ``load_checkpoint`` that read neither weights nor checksums.

    Returns:
        Whether transformers must convert the weights, which needs memory for a second copy, and
        one text with all notices about the checkpoint, or "".
    """
    weights = read_weights(checkpoint, part)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        _fitting_adapter(model, weights.state, checkpoint)
        return False, ""
    without_numbers = {key: value.to("meta") for key, value in weights.state.items()}
    fit = match_state_dict(model, without_numbers, str(checkpoint), weights.within)
    notices = weights.notice, config_notice(model, checkpoint)
    return fit.names is None, " ".join(filter(None, notices))


def _fitting_adapter(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> Adapter:
    """Return the model's adapter. Raise an error unless the adapter in ``folder`` fits it."""
    adapter = Adapter.active(model, folder)
    settings, layer_settings = adapter.differing_settings(folder)
    misfits = misfits_of(state, adapter.weights(state))
    settings += layer_settings if misfits else []
    if settings:
        misfits["in settings"] = settings
    if misfits:
        raise InputError(
            f"{folder}: an adapter's weights and settings must be those of the PeftModel "
            f"that make_model() returns. Found differences: {in_words(misfits)}. Build the "
            "PeftModel with the config that was used for training, "
            "`PeftConfig.from_pretrained(folder)`, on the same base model.",
            code="study.adapter_settings",
        )
    return adapter


def hash_tensors(digest: Any, tensors: Mapping[Any, Tensor]) -> None:
    """Update a hash object with the name, dtype, shape and bytes of each tensor, in order."""
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)


def state_dict_sha256(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of a state dict's tensors."""
    digest = hashlib.sha256()
    hash_tensors(digest, state)
    return digest.hexdigest()
