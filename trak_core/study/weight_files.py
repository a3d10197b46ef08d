"""Find the files of a checkpoint's weights, and read them by torch and safetensors.

Nothing in a file is run. Tensors are maps of it: numbers are read from the disk when they are used.
"""

import hashlib
import json
import mmap
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from trak_core.errors import InputError, came_from_no_memory, listed
from trak_core.spec import ADAPTER_CONFIG

# How files of torch.save begin since 1.6; and safetensors, from their eighth byte on.
_ZIP, _SAFETENSORS = b"PK\x03\x04", b"\0{"
_FOLDER = 0x10  # among a zip entry's attributes
_AGAIN = "Copy it again."
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Files of a Hugging Face folder, the first that exists counts; an index names shards.
_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Where training frameworks put the state dict inside a larger dict.
WRAPPERS = ("state_dict", "model_state_dict", "model")


class _LeftOut:
    """Stands for an object of a file: neither its class nor its code is looked for."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _load(path: Path, *, is_zip: bool) -> Any:
    """Return what torch reads; of a larger dict around weights without entries that hold objects.

    Lightning's files have hyper-parameters beside the weights, others the arguments of a training.
    """
    name = str(path)

    def load() -> Any:
        if is_zip and not name.endswith(".safetensors"):  # which torch takes for what it is not
            return torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    try:
        return load()
    except Exception as error:
        if "GLOBAL" in str(error):
            # What this fails at too is told as it was before.
            with suppress(Exception):
                with path.open("rb") as file:
                    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
                with torch.serialization.safe_globals([(_LeftOut, name) for name in names]):
                    saved = load()
                saved = {key: value for key, value in saved.items() if not _holds_objects(value)}
                if any(name for name, _ in state_dicts(saved)):
                    return saved
        raise


def is_state_dict(saved: object) -> bool:
    """Whether something is a mapping of names to tensors."""
    return isinstance(saved, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in saved.items()
    )


def state_dicts(saved: Any, name: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the state dicts that a file holds, each after the keys that lead to it.

    The keys are joined by dots. An optimizer's state is none, nor are numbers without a shape.
    """
    if is_state_dict(saved):
        if any(value.ndim and value.is_floating_point() for value in saved.values()):
            yield name, saved
    elif isinstance(saved, dict) and "param_groups" not in saved:
        for key, value in saved.items():
            if isinstance(key, str):
                yield from state_dicts(value, f"{name}.{key}" if name else key)


def _holds_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_objects, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_holds_objects, value))
    return value is _LeftOut or isinstance(value, _LeftOut)


class _Mapped(mmap.mmap):
    def seekable(self) -> bool:
        """Say so, which Python's own does from 3.13 on."""
        return True


def _refuse_damage(path: Path) -> None:
    """Compare the checksums of a zip file's parts, which torch doesn't; it maps only plain ones."""
    with (
        path.open("rb") as file,
        _Mapped(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        zipfile.ZipFile(cast("IO[bytes]", mapped)) as archive,
    ):
        # torch may return unread memory for a part that is marked as a folder.
        if any(part.compress_type or part.external_attr & _FOLDER for part in archive.infolist()):
            raise ValueError("its parts are compressed, or folders: torch.save never does that")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"the checksum of its part {damaged} differs: the file is damaged, or was saved after "
            "torch.serialization.set_crc32_options(False)"
        )


def read_tensors(path: Path, must: str, remedy: str, digest: Any = None) -> Any:
    """Return what a file holds: tensors, and nothing that would run code, on the CPU.

    Its first bytes tell whether it is of safetensors, not its name. With ``digest``, a hash that
    gets the file's bytes, damage to files of torch.save is looked for.

    An ``InputError`` of a file that cannot be read, or is damaged, says what it ``must`` be.
    """
    start = b""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        is_zip = start.startswith(_ZIP)
        if is_zip and not zipfile.is_zipfile(path):
            raise EOFError("it begins as a zip file and ends as none: it was cut off")
        if digest is not None:
            if is_zip:
                _refuse_damage(path)
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return load_file(path) if start[7:9] == _SAFETENSORS else _load(path, is_zip=is_zip)
    except Exception as error:
        if came_from_no_memory(error):
            raise
        # What a broken file makes of its reader is open-ended: any error is the file's.
        is_known = start.startswith((_ZIP, b"\x80")) or start[7:9] == _SAFETENSORS
        begins = "" if is_known else f" It begins with {start[:32]}."
        raise InputError(
            f"{path}: {must}; pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error)}.{begins} {remedy}",
            code="study.tensor_file",
        ) from error


def _reason(error: Exception) -> str:
    """Return what a reader of tensors complains of, without the advice of torch."""
    text = str(error) or type(error).__name__
    if held := re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text):
        return f"it holds {held[1].rstrip('.')}"
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else text.splitlines()[0]
    return re.split(r" In PyTorch 2|\(Could this", first)[0].rstrip(". ")


def _shards(index: Path) -> list[Path]:
    """Return the files that an index names, all beside it."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
        if outside or not names:
            other = f"{outside[0]!r} is not" if outside else "it does not name"
            raise ValueError(f"{other} a file of this folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{index}: the index of a checkpoint folder must be JSON with a mapping `weight_map` "
            f"of names to files. Reading it failed: {type(error).__name__}: {error}. {_AGAIN}",
            code="study.checkpoint_index",
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise InputError(
            f"{index}: every file that the index of a checkpoint folder names must be beside it. "
            f"Found no {listed(missing)}. Copy the whole folder again.",
            code="study.checkpoint_shards",
        )
    return [index.parent / name for name in names]


def weight_files(checkpoint: Path) -> tuple[list[Path], Path | None]:
    """Return the files of a checkpoint's weights; and an adapter's config or an index, if any."""
    if not checkpoint.exists():
        raise InputError(f"{checkpoint}: a checkpoint must exist. Found nothing there.")
    if not checkpoint.is_dir():
        if checkpoint.name in ADAPTER_WEIGHTS:
            raise InputError(
                f"{checkpoint}: an adapter's weights must come with its {ADAPTER_CONFIG}. Found "
                "the weights alone; name their folder.",
                code="study.adapter_folder",
            )
        return [checkpoint], None
    whole, adapter, config = (
        next((checkpoint / name for name in names if (checkpoint / name).is_file()), None)
        for names in (_FOLDER_FILES, ADAPTER_WEIGHTS, (ADAPTER_CONFIG,))
    )
    if whole and not (adapter or config):
        refuse_quantized(checkpoint)
        return (_shards(whole), whole) if whole.suffix == ".json" else ([whole], None)
    if adapter and config and not whole:
        return [adapter], config
    _refuse_pieces(checkpoint)
    contents = ", ".join(sorted(p.name for p in checkpoint.iterdir())) or "nothing"
    if adapter or config:
        raise InputError(
            f"{checkpoint}: a folder of an adapter must hold {ADAPTER_CONFIG} and one of "
            f"{', '.join(ADAPTER_WEIGHTS)}, and no weights of a whole model. Found {contents}. "
            "Save the adapter again by PeftModel.save_pretrained, into a folder of its own.",
            code="study.adapter_folder",
        )
    raise InputError(
        f"{checkpoint}: a checkpoint folder must hold one of {', '.join(_FOLDER_FILES)}, or of "
        f"{', '.join(ADAPTER_WEIGHTS)} with {ADAPTER_CONFIG}, or folders checkpoint-<step> that "
        f"do, as a Trainer leaves them. Found {contents}."
    )


def _refuse_pieces(folder: Path) -> None:
    """Name the command that makes weights of a folder where each process saved a piece."""
    pieces = next(folder.rglob("*.distcp"), None)
    script = folder / "zero_to_fp32.py"
    if pieces is not None:
        module = "torch.distributed.checkpoint.format_utils"
        kind, command = "FSDP", f"python -m {module} dcp_to_torch {pieces.parent} weights.pt"
    elif script.is_file():
        kind, command = "DeepSpeed", f"python {script} {folder} whole-weights"
    elif (name := _parts_of_zero(folder)) is not None:
        raise InputError(
            f"{folder}: a checkpoint must hold whole weights. Found those of DeepSpeed, in pieces, "
            f"one for each process, in {name}, without the script zero_to_fp32.py that DeepSpeed "
            "writes beside them. Call "
            "`deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint`, save what it "
            "returns by torch.save, and name that file.",
            code="study.checkpoint_pieces",
        )
    else:
        return
    raise InputError(
        f"{folder}: a checkpoint must hold whole weights. Found those of {kind}, in pieces, one "
        f"for each process. Put them together by `{command}`, and name what that writes.",
        code="study.checkpoint_pieces",
    )


def _parts_of_zero(folder: Path) -> str | None:
    """Return the name of a folder of DeepSpeed's with pieces, which may be this one."""
    for pattern in ("*_optim_states.pt", "zero_pp_rank_*_model_states.pt"):
        for part in sorted(folder.rglob(pattern)):
            return part.parent.name
    return None


def refuse_quantized(folder: Path) -> None:
    """Refuse a Hugging Face folder whose weights are quantized, by what its files say."""
    config = folder / "config.json"
    told = "`quantization_config` in config.json"
    if not config.is_file() or b'"quantization_config"' not in config.read_bytes():
        # Files of AutoGPTQ and AutoAWQ.
        others = (folder / name for name in ("quantize_config.json", "quant_config.json"))
        told = next((path.name for path in others if path.is_file()), "")
    if told:
        raise InputError(
            f"{folder}: a model's weights must be numbers of their own. Found quantized ones, "
            f"by {told}. Take the weights from before, or save "
            "`model.dequantize()`.",
            code="study.checkpoint_quantized",
        )
