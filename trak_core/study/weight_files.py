"""Find the files that contain a checkpoint's weights, and read them with torch or safetensors.

Code in these files is never executed. Tensors are memory-mapped, so values are read on first use.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from trak_core.errors import InputError, caused_by_out_of_memory, listed
from trak_core.settings import ADAPTER_CONFIG

# Since torch 1.6, torch.save writes zip files, which begin with _ZIP. A safetensors file begins
# with 8 bytes for the length of its header, the last of which is 0. The header begins with "{".
_ZIP, _SAFETENSORS = b"PK\x03\x04", b"\0{"
_FOLDER = 0x10  # The attribute of an entry in a zip file that marks it as a folder.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Files of weights in a Hugging Face folder, of which the first existing one is read. An index is a
# list of several files that together contain the weights.
_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Keys under which training frameworks store a state dict in a file with other objects.
WRAPPERS = ("state_dict", "model_state_dict", "model")


class _LeftOut:
    """A stand-in for the classes of pickled objects, whose code must not be executed."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _load(path: Path, *, is_zip: bool) -> Any:
    """Return the dict in a torch.save file, without entries that cannot be loaded safely.

    Some frameworks store objects of their own classes together with the weights. For example,
    Lightning stores hyper-parameters. ``torch.load(weights_only=True)`` refuses such objects. Its
    error is raised if no state dict remains without them.
    """
    name = str(path)

    def load() -> Any:
        # torch can map only zip files into memory. torch.load would read a path that ends in
        # .safetensors as safetensors, even if torch.save wrote the file.
        if is_zip and not name.endswith(".safetensors"):
            return torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    try:
        return load()
    except Exception as error:
        if "GLOBAL" in str(error):
            with suppress(Exception):  # If this fails too, the original error is raised.
                with path.open("rb") as file:
                    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
                with torch.serialization.safe_globals([(_LeftOut, name) for name in names]):
                    saved = load()
                saved = {key: value for key, value in saved.items() if not _has_objects(value)}
                if any(name for name, _ in state_dicts(saved)):
                    return saved
        raise


def is_state_dict(saved: object) -> bool:
    """Return whether an object is a dict from names to tensors."""
    return isinstance(saved, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in saved.items()
    )


def state_dicts(saved: Any, name: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each state dict in a nested dict, as a pair of its name and the state dict.

    The name consists of the keys that lead to the state dict, joined by dots. It begins with
    ``name``, the name of ``saved`` itself. Optimizer states are skipped, and so are dicts that
    contain only scalars or integers.
    """
    if is_state_dict(saved):
        if any(value.ndim and value.is_floating_point() for value in saved.values()):
            yield name, saved
    elif isinstance(saved, dict) and "param_groups" not in saved:
        for key, value in saved.items():
            if isinstance(key, str):
                yield from state_dicts(value, f"{name}.{key}" if name else key)


def _has_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_objects, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(_has_objects, value))
    return value is _LeftOut or isinstance(value, _LeftOut)


def _check_zip(path: Path) -> None:
    """Raise an error if a checksum in a zip file is wrong. torch does not verify checksums."""
    with zipfile.ZipFile(path) as archive:
        # torch can map only uncompressed parts of a zip file into memory. If a part is marked as a
        # folder, torch may return uninitialized memory as its content.
        if any(part.compress_type or part.external_attr & _FOLDER for part in archive.infolist()):
            raise ValueError("it has compressed parts or folders, which torch.save never writes")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"the checksum of its part {damaged} is wrong. The file is damaged, or was saved after "
            "torch.serialization.set_crc32_options(False)"
        )


def read_tensors(path: Path, must: str, remedy: str, digest: Any = None) -> Any:
    """Return the content of a torch.save or safetensors file, with tensors on the CPU.

    The format is recognized by the first bytes of the file, not by its name. If reading fails, the
    message contains ``must`` (a sentence on what the file must be) and ``remedy`` (a sentence on
    what to do). ``digest`` is None or a hash object, which is updated with the file's bytes. With
    a hash object, the checksums in a torch.save file are verified, too.
    """
    start = b""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        is_zip = start.startswith(_ZIP)
        if is_zip and not zipfile.is_zipfile(path):
            raise EOFError("it begins like a zip file, but it was cut off")
        if digest is not None:
            if is_zip:
                _check_zip(path)
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return load_file(path) if start[7:9] == _SAFETENSORS else _load(path, is_zip=is_zip)
    except Exception as error:  # A damaged file can raise any error.
        if caused_by_out_of_memory(error):
            raise
        is_known = start.startswith((_ZIP, b"\x80")) or start[7:9] == _SAFETENSORS
        begins = "" if is_known else f" It begins with {start[:32]}."
        raise InputError(
            f"{path}: {must}. Pickled objects other than tensors are never loaded. Reading the "
            f"file failed: {_reason(error)}.{begins} {remedy}",
            code="study.tensor_file",
        ) from error


def _reason(error: Exception) -> str:
    """Return the cause of an error from torch or safetensors, without the advice in its message."""
    text = str(error) or type(error).__name__
    if unsafe := re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text):
        return f"it contains {unsafe[1].rstrip('.')}"
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else text.splitlines()[0]
    return re.split(r" In PyTorch 2|\(Could this", first)[0].rstrip(". ")


def _shards(index: Path) -> list[Path]:
    """Return the files of weights that an index lists, which must be in the folder of the index."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"it must list files in its own folder, but lists {listed(names)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{index}: the index of a checkpoint must be JSON with a mapping `weight_map` from "
            f"names to files. Reading it failed: {type(error).__name__}: {error}. Copy it again.",
            code="study.checkpoint_index",
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise InputError(
            f"{index}: every file that the index lists must exist in its folder. Found no "
            f"{listed(missing)}. Copy the whole folder again.",
            code="study.checkpoint_shards",
        )
    return [index.parent / name for name in names]


def weight_files(checkpoint: Path) -> tuple[list[Path], Path | None]:
    """Return the paths of a checkpoint's files.

    Returns:
        The files that contain the weights, and one other file: the config of an adapter, or the
        index that lists the files of weights. None if the checkpoint has no such file.

    Raises:
        InputError: If a folder contains no weights, or those of both an adapter and a whole model.
    """
    if not checkpoint.exists():
        raise InputError(
            f"{checkpoint}: a checkpoint must be a file or a folder. Found nothing at this path. "
            "Correct the path, or copy the checkpoint to it.",
            code="study.no_weights",
        )
    if not checkpoint.is_dir():
        if checkpoint.name in ADAPTER_WEIGHTS:
            raise InputError(
                f"{checkpoint}: the checkpoint of an adapter must be a folder that also contains "
                f"{ADAPTER_CONFIG}. Found only the file of weights. Use the folder instead.",
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
    contents = ", ".join(sorted(p.name for p in checkpoint.iterdir())) or "nothing"
    raise InputError(
        f"{checkpoint}: a checkpoint folder must contain either a whole model (one of "
        f"{', '.join(_FOLDER_FILES)}), or an adapter (one of {', '.join(ADAPTER_WEIGHTS)} with "
        f"{ADAPTER_CONFIG}), or folders checkpoint-<step> of a Trainer. Found {contents}. If each "
        "process saved a part of the weights, join the parts. For FSDP, run `python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch`. For DeepSpeed, run its "
        "`zero_to_fp32.py`.",
        code="study.no_weights",
    )


def refuse_quantized(folder: Path) -> None:
    """Raise an error if the files in a Hugging Face folder show that its weights are quantized."""
    names = ("quantize_config.json", "quant_config.json")  # AutoGPTQ and AutoAWQ write these files.
    sign = next((name for name in names if (folder / name).is_file()), "")
    config = folder / "config.json"
    if config.is_file() and b'"quantization_config"' in config.read_bytes():
        sign = "`quantization_config` in config.json"
    if sign:
        raise InputError(
            f"{folder}: a checkpoint's weights must not be quantized. Found {sign}. Use the "
            "weights from before quantization, or save `model.dequantize()`.",
            code="study.checkpoint_quantized",
        )
