"""Fit the weights of a checkpoint to a model."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.spec import ADAPTER_CONFIG
from trak_core.study.fit_weights import fit_weights, in_words, misfits_of
from trak_core.study.hugging_face_weights import Adapter
from trak_core.study.unset_weights import built_without_draws
from trak_core.study.weight_files import (
    WRAPPERS,
    is_safetensors,
    is_state_dict,
    read_shapes,
    read_tensors,
    state_dicts,
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


class _Weights(NamedTuple):
    """The weights that are taken from files.

    ``within`` are the keys that lead to them in a file, joined by dots; ``notice`` says that others
    could have been taken.
    """

    state: dict[str, Tensor]
    within: str
    notice: str


def _taken(saved: Any, path: Path) -> _Weights:
    """Take the state dict out of what a file holds, where nothing says which."""
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
            f"the weights under `{name}` are taken. Found others under {listed(others)}; "
            "`state_dict` of a checkpoint in the config says which to take."
        )
        return _Weights(state, name, notice if others else "")
    remedy = _REMEDY
    if parts:
        ways = " or ".join(f"`state_dict: {part}`" for part in parts)
        remedy = f"Say which for the checkpoint in the config: {ways}."
    entries = saved if isinstance(saved, dict) else {}
    raise InputError(
        f"{path}: a checkpoint must be a state dict (names to tensors), possibly under one of "
        f"the keys {', '.join(WRAPPERS)}. Found {type(saved).__name__} with "
        f"{', '.join(map(str, [*entries][:5])) or 'no keys'}. {remedy}",
        code="study.state_dict",
    )


def _weights(
    files: Sequence[Path], read: Callable[[Path], Any], part: str | None, source: Path
) -> _Weights | None:
    """Return what is taken from all files of a checkpoint; None if ``read`` returns that."""
    state, within, notice = dict[str, Tensor](), part or "", ""
    for path in files:
        saved = read(path)
        if saved is None:
            return None
        if part is None:
            shard, within, notice = _taken(saved, path)
        else:
            named = state_dicts(saved)
            shard = {f"{name}.{k}" if name else k: v for name, own in named for k, v in own.items()}
        twice = sorted(state.keys() & shard.keys())
        # Two saves into one folder: nobody knows which one is older.
        if twice:
            raise InputError(
                f"{path}: each weight must be in one file of a checkpoint folder. Found in another "
                f"one too: {listed(twice)}. Save the checkpoint again, into an empty folder.",
                code="study.checkpoint_shards",
            )
        state.update(shard)
    start = f"{part}." if part else ""
    chosen = {k.removeprefix(start): v for k, v in state.items() if k.startswith(start)}
    if part and not chosen:
        raise InputError(
            f"{source}: `state_dict` of a checkpoint must be the keys that lead to its weights, "
            f"joined by dots. Found no {part}, and weights under "
            f"{listed(sorted({key.split('.')[0] for key in state}))}.",
            code="study.no_such_part",
        )
    return _Weights(chosen, within, notice)


def read_state_dict(checkpoint: Path, part: str | None = None) -> tuple[dict[str, Tensor], str]:
    """Read the weights of a checkpoint, on the CPU.

    It is a state dict written by ``torch.save``, a ``.safetensors`` file, a Hugging Face folder,
    sharded or not, or a folder of an adapter of PEFT's; anything else is an ``InputError``. Where a
    file has several state dicts, ``part`` are the keys that lead to one, joined by dots; keys of
    one state dict that begin so are a part too.

    Returns:
        Names to tensors; and the SHA-256 of the files that decide the numbers, in order. An
        adapter's config, or an index, comes before the weights.
    """
    weights, sha256 = _read(checkpoint, part)
    return weights.state, sha256


def _read(checkpoint: Path, part: str | None) -> tuple[_Weights, str]:
    files, config = weight_files(checkpoint)
    digest = hashlib.sha256(config.read_bytes() if config else b"")
    weights = _weights(
        files, lambda path: read_tensors(path, _MUST, _REMEDY, digest.update), part, checkpoint
    )
    assert weights is not None
    return weights, digest.hexdigest()


def load_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], source: str, within: str = ""
) -> None:
    """Put weights into ``model``, and the model into evaluation mode.

    Every parameter and buffer of the model must be there, with its shape, and nothing else. Tied
    parameters need to be there once, and must be equal otherwise; ``num_batches_tracked`` of norms
    may be missing, because evaluation mode doesn't read it. ``fit_weights`` says which prefixes and
    wrappers in names don't count; a line on standard output tells of them. Weights must be finite.
    An ``InputError`` lists what doesn't fit, and names the ``source`` of the weights, and the keys
    ``within`` it that lead to them.
    """
    fitting, _, told = fit_weights(model, state, source, within)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_finite({k: v for k, v in fitting.items() if k in parameters}, source)
    _check_tied(parameters, fitting, source)
    _tell(told, source)
    model.load_state_dict(fitting, strict=False)
    model.eval()


def _tell(told: Iterable[str], source: str) -> None:
    for text in told:
        print(f"{source}: {text}")


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


def load_checkpoint(model: nn.Module, checkpoint: Path, part: str | None = None) -> dict[str, str]:
    """Put the weights of a file or folder into ``model``, and the model into evaluation mode.

    ``read_state_dict`` says what is read and what ``part`` is, ``load_state_dict`` what fits. A
    notice on standard output says where a file has more than the weights that are taken. A folder
    of an adapter of PEFT's gives the active adapter of a PeftModel its weights: every one must be
    there, with its shape, and nothing else; and the model must have the settings that it was saved
    with, because they decide what its weights mean. The base's weights don't change.

    Returns:
        What tells these weights from others: ``sha256``, of the files (see ``read_state_dict``).
        An adapter's files hold a few weights of many: its ``model_sha256`` is of all that the
        model has with it, so that files made on different bases are never taken together.
    """
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    if not is_adapter and _loads_plainly(model):
        files, index = weight_files(checkpoint)
        if all(map(is_safetensors, files)):
            streamed = _stream(model, files, index, part, checkpoint)
            if streamed is not None:
                return {"sha256": streamed}
    (state, within, notice), sha256 = _read(checkpoint, part)
    if notice:
        print(f"Notice: {checkpoint}: {notice}")
    if not is_adapter:
        load_state_dict(model, state, str(checkpoint), within)
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


def _stream(
    model: nn.Module, files: Sequence[Path], index: Path | None, part: str | None, checkpoint: Path
) -> str | None:
    """Return the SHA-256 of ``read_state_dict``; do what ``load_state_dict`` does.

    Files of safetensors are read a tensor at a time: no weights are held beside the model's own.
    None, and nothing is done, where transformers must rename them.
    """
    shapes, source = dict[str, Tensor](), str(checkpoint)

    def read(path: Path) -> dict[str, Tensor]:
        shapes.update(of_file := read_shapes(path, _MUST, _REMEDY))
        return of_file

    weights = _weights(files, read, part, checkpoint)
    assert weights is not None
    _, fitted, told = fit_weights(model, _without_numbers(weights.state), source, weights.within)
    if fitted is None:
        return None
    # The model's names by the files'; keys of other parts have none.
    names = {f"{part}.{key}" if part else key: name for key, name in fitted.items()}
    own, named = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    parameters = {key: named[name] for key, name in names.items() if name in named}
    # A tied parameter is read once; its others are compared.
    first = {id(p): key for key, p in reversed(parameters.items())}
    others = {key: first[id(p)] for key, p in parameters.items() if first[id(p)] != key}
    places = {key: own[name] for key, name in names.items() if key not in others}
    ties: dict[str, Tensor] = {}
    bad: list[str] = []
    digest = hashlib.sha256(index.read_bytes() if index else b"")
    for path in files:
        for key, values in stream_tensors(path, _MUST, _REMEDY, digest.update, shapes, places):
            if key in parameters and not _is_finite(values):
                bad.append(names[key])
            if key in others:
                ties[key] = values
            elif key in places and values is not places[key]:
                places[key].copy_(values)
    _refuse_not_finite(bad, source)
    _refuse_untied(
        [
            names[key]
            for tied, values in ties.items()
            if not torch.equal(values.to(parameters[tied]), parameters[tied])
            for key in (others[tied], tied)
        ],
        source,
    )
    _tell(told, source)
    model.eval()
    return digest.hexdigest()


class Checked(NamedTuple):
    """What the preflight has seen of a checkpoint that fits.

    ``is_renamed`` says whether transformers must rename its weights, for which more than one copy
    is held; ``notice`` that a file has other weights than those that are taken, empty elsewhere.
    """

    is_renamed: bool = False
    notice: str = ""


def check_checkpoint(model: nn.Module, checkpoint: Path, part: str | None = None) -> Checked:
    """Refuse what ``load_checkpoint`` would, except numbers and checksums, which stay unread."""
    weights = weights_without_numbers(checkpoint, part)
    if weights is None:
        return Checked()
    if (checkpoint / ADAPTER_CONFIG).is_file():
        _fitting_adapter(model, weights.state, checkpoint)
        return Checked()
    without_numbers = _without_numbers(weights.state)
    fit = fit_weights(model, without_numbers, str(checkpoint), weights.within)
    return Checked(fit.names is None, weights.notice)


def weights_without_numbers(checkpoint: Path, part: str | None = None) -> _Weights | None:
    """Return what ``read_state_dict`` reads, with numbers that stay unread.

    None for a file of torch before 1.6, which can only be read whole.
    """
    files, _ = weight_files(checkpoint)
    return _weights(files, lambda path: read_shapes(path, _MUST, _REMEDY), part, checkpoint)


def _without_numbers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.to("meta") for key, value in state.items()}


def _fitting_adapter(model: nn.Module, state: Mapping[str, Tensor], folder: Path) -> Adapter:
    """Return the model's adapter, which the weights fit."""
    adapter = Adapter.of(model, folder)
    settings, of_keys = adapter.other_settings(folder / ADAPTER_CONFIG)
    misfits = misfits_of(state, adapter.weights(state))
    settings += of_keys if misfits else []
    if settings:
        misfits["of another setting"] = settings
    if misfits:
        raise InputError(
            f"{folder}: an adapter's weights and settings must be those of the PeftModel "
            f"that make_model() returns. Found {in_words(misfits)}. Build it with the config of "
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
