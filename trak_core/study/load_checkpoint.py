"""Fit the weights of a checkpoint to a model."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    is_state_dict,
    read_tensors,
    state_dicts,
    weight_files,
)

_MUST = "a checkpoint must be a state dict saved by torch.save, or safetensors"
_REMEDY = "Copy it again, or save `model.state_dict()` and use that file."
# Entries that are checked at a time, and bytes that are read at a time.
_PIECE, _PIECE_BYTES = 2**20, 2**26
# How modules take weights: copies, and torch's norms, which only add what old files lack.
_PLAIN_LOADS = {
    nn.Module._load_from_state_dict,
    nn.BatchNorm1d._load_from_state_dict,
    nn.InstanceNorm1d._load_from_state_dict,
}


class Weights(NamedTuple):
    """The weights that are taken from files.

    ``within`` are the keys that lead to them in a file, joined by dots; ``notice`` says that others
    could have been taken.
    """

    state: dict[str, Tensor]
    within: str
    notice: str


def _taken(saved: Any, path: Path) -> Weights:
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
        return Weights(state, name, notice if others else "")
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


def read_weights(checkpoint: Path, part: str | None = None, digest: Any = None) -> Weights:
    """Return what is taken from all files of a checkpoint; see ``read_state_dict``."""
    state, within, notice = dict[str, Tensor](), part or "", ""
    files, config = weight_files(checkpoint)
    if digest is not None and config is not None:
        digest.update(config.read_bytes())
    for path in files:
        saved = read_tensors(path, _MUST, _REMEDY, digest)
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
            f"{checkpoint}: `state_dict` of a checkpoint must be the keys that lead to its "
            f"weights, joined by dots. Found no {part}, and weights under "
            f"{listed(sorted({key.split('.')[0] for key in state}))}.",
            code="study.no_such_part",
        )
    odd = {key: kind for key, value in chosen.items() if (kind := _odd_kind(value))}
    if odd:
        raise InputError(
            f"{checkpoint}: weights must be tensors of plain numbers. Found "
            f"{listed(f'{key}, {kind}' for key, kind in odd.items())}. Save whole tensors in "
            "floating point, `model.state_dict()` of the model as it was trained.",
            code="study.tensor_file",
        )
    return Weights(chosen, within, notice)


def _odd_kind(value: Tensor) -> str:
    """Return what a tensor is that is no array of numbers; empty for one that is."""
    if type(value) not in {Tensor, nn.Parameter}:
        return type(value).__name__  # a piece of one, for one
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "meta": value.is_meta}
    return next((kind for kind, is_so in kinds.items() if is_so), "")


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
    digest = hashlib.sha256()
    return read_weights(checkpoint, part, digest).state, digest.hexdigest()


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
    _put(model, [fitting], fitting, source, told)


def _put(
    model: nn.Module,
    pieces: Iterable[Mapping[str, Tensor]],
    whole: Mapping[str, Tensor],
    source: str,
    told: Iterable[str],
) -> None:
    """Copy weights into a model, piece after piece of the ``whole``, and say what was done."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_tied(parameters, whole, source)
    for piece in pieces:
        _check_finite({k: v for k, v in piece.items() if k in parameters}, source)
        model.load_state_dict(piece, strict=False)
    model.eval()
    for text in told:
        print(f"{source}: {text}")


def _check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    bad = [key for key, value in weights.items() if not _is_finite(value)]
    if bad:
        raise InputError(
            f"{source}: a checkpoint's weights must be finite. Found NaN or infinity in "
            f"{listed(bad)}. Take an earlier checkpoint, or train again.",
            code="study.checkpoint_finite",
        )


def _is_finite(values: Tensor) -> bool:
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.is_floating_point():
        return True
    # The least and the greatest: nearly ten times as fast as torch.isfinite.
    parts = values.flatten().split(_PIECE) if values.numel() else ()
    return all(bool(torch.stack(part.aminmax()).isfinite().all()) for part in parts)


def _check_tied(
    parameters: Mapping[str, Tensor], fitting: Mapping[str, Tensor], source: str
) -> None:
    """Refuse two weights for one parameter: the model would silently have the last."""
    first: dict[int, str] = {}
    differing = set[str]()
    for key, own in parameters.items():
        if key not in fitting:
            continue
        other = first.setdefault(id(own), key)
        if other != key and not torch.equal(*(fitting[k].to(own.dtype) for k in (key, other))):
            differing |= {other, key}
    if differing:
        raise InputError(
            f"{source}: weights of parameters that the model ties must be equal. Found different "
            f"ones in {listed(sorted(differing))}. Let make_model() tie what was tied in "
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
    digest, source, before = hashlib.sha256(), str(checkpoint), _stamps(checkpoint)
    weights = read_weights(checkpoint, part, digest)
    sha256 = digest.hexdigest()
    if weights.notice:
        print(f"Notice: {checkpoint}: {weights.notice}")
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        fitting, names, told = fit_weights(model, weights.state, source, weights.within)
        pieces = [fitting]
        if names is not None and _loads_plainly(model):
            pieces = _pieces(checkpoint, part, names, weights.state, before)
        _put(model, pieces, fitting, source, told)
        return {"sha256": sha256}
    state = weights.state
    adapter = _fitting_adapter(model, state, checkpoint)
    _check_finite(state, source)
    adapter.put(state)
    model.eval()
    # Modules may keep what is no tensor there.
    own = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    return {"sha256": sha256, "model_sha256": state_dict_sha256(own)}


def _pieces(
    checkpoint: Path,
    part: str | None,
    names: Mapping[str, str],
    state: Mapping[str, Tensor],
    before: list[tuple[int, ...]],
) -> Iterator[dict[str, Tensor]]:
    """Yield weights by the model's ``names``, mapped anew: what was read of the last is let go.

    Files must be those of ``before``, by their ``_stamps``: other numbers have another digest.
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
            f"{checkpoint}: a checkpoint must stay as it is while it is read. Found that it was "
            "replaced. Run the job again.",
            code="study.checkpoint_replaced",
        )


def _stamps(checkpoint: Path) -> list[tuple[int, ...]]:
    """Return what tells that files were replaced or written to since."""
    stats = [path.stat() for path in weight_files(checkpoint)[0]]
    return [(s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]


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


class Checked(NamedTuple):
    """What the preflight has seen of a checkpoint that fits.

    ``is_renamed`` says whether transformers must rename its weights, for which more than one copy
    is held; ``notice`` that a file has other weights than those that are taken, empty elsewhere.
    """

    is_renamed: bool = False
    notice: str = ""


def check_checkpoint(model: nn.Module, checkpoint: Path, part: str | None = None) -> Checked:
    """Refuse what ``load_checkpoint`` would, except numbers and checksums, which stay unread."""
    weights = read_weights(checkpoint, part)
    if (checkpoint / ADAPTER_CONFIG).is_file():
        _fitting_adapter(model, weights.state, checkpoint)
        return Checked()
    without_numbers = {key: value.to("meta") for key, value in weights.state.items()}
    fit = fit_weights(model, without_numbers, str(checkpoint), weights.within)
    return Checked(fit.names is None, weights.notice)


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
