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

# Files that torch.save has written since torch 1.6 begin with _ZIP. A safetensors file begins with
# the length of its header in 8 bytes. The last of these bytes is 0, and the header begins with "{".
_ZIP, _SAFETENSORS = b"PK\x03\x04", b"\0{"
_FOLDER = 0x10  # The attribute that marks a folder in a zip file.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Files of weights in a Hugging Face folder. The first one that exists is read. An index lists
# several files that together contain the weights.
_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The keys under which training frameworks store a state dict together with other objects.
WRAPPERS = ("state_dict", "model_state_dict", "model")


class _LeftOut:
    """A stand-in for all classes of objects in a file, so that their code is not executed."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _load(path: Path, *, is_zip: bool) -> Any:
    """Return the dict in a torch.save file, without the entries that contain objects.

    Some frameworks store objects with the weights, such as Lightning's hyper-parameters. If no
    state dict without objects remains, torch's error is raised.
    """
    name = str(path)

    def load() -> Any:
        # torch can map only zip files into memory. If it opened a file named .safetensors, it would
        # read the file as safetensors, whatever its content is.
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
    """Yield each state dict in a nested dict, preceded by the keys that lead to it.

    The keys are joined by dots, after ``name``. States of optimizers and dicts that contain only
    scalars or integers are skipped.
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
    """Raise an error if a checksum in a zip file is wrong. torch does not verify the checksums."""
    with zipfile.ZipFile(path) as archive:
        # torch can map only uncompressed parts into memory. For a part that is marked as a folder,
        # it may return uninitialized memory.
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

    The format is recognized by the first bytes of the file, not by its name. Error messages contain
    ``must``, which says what the file must be, and ``remedy``, which says what to do. ``digest`` is
    a hash object or None. If it is given, it is updated with the file's bytes, and the checksums in
    a torch.save file are verified.
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
    """Return the cause that an error from torch or safetensors states, without torch's advice."""
    text = str(error) or type(error).__name__
    if unsafe := re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text):
        return f"it contains {unsafe[1].rstrip('.')}"
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else text.splitlines()[0]
    return re.split(r" In PyTorch 2|\(Could this", first)[0].rstrip(". ")


def _shards(index: Path) -> list[Path]:
    """Return the files of weights that an index lists. They must be in the folder of the index."""
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
    """Return a checkpoint's files of weights, and the file of an adapter's config or an index.

    The second entry is None if a checkpoint has neither an adapter's config nor an index.

    Raises:
        InputError: If a folder contains no weights, or weights of an adapter and of a whole model.
    """
    if not checkpoint.exists():
        raise InputError(
            f"{checkpoint}: a checkpoint must exist. Found nothing there.", code="study.no_weights"
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
    """Raise an error if a file in a Hugging Face folder shows that its weights are quantized."""
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
