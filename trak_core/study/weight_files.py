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

# Since torch 1.6, files that torch.save writes begin with _ZIP. A safetensors file begins with the
# length of its header in 8 bytes. The last of these bytes is 0, and the header begins with "{".
_ZIP, _SAFETENSORS = b"PK\x03\x04", b"\0{"
_FOLDER = 0x10  # The attribute of an entry of a zip file that marks a folder.
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Files in a Hugging Face folder. The first one that exists is read. An index lists files of shards.
_FOLDER_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Keys under which training frameworks store the state dict in a larger dict.
WRAPPERS = ("state_dict", "model_state_dict", "model")


class _LeftOut:
    """A replacement for all classes of objects in a file, so that the classes are not imported."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _load(path: Path, *, is_zip: bool) -> Any:
    """Load a file with torch, and remove the entries that contain objects.

    Some frameworks store objects with the weights, such as Lightning's hyper-parameters. If a state
    dict contains objects, or if the file has no state dict, torch's error is raised.

    Returns:
        The dict in the file.
    """
    name = str(path)

    def load() -> Any:
        # torch memory-maps only zip files, and reads a file named .safetensors as safetensors.
        if is_zip and not name.endswith(".safetensors"):
            return torch.load(name, map_location="cpu", weights_only=True, mmap=True)
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)

    try:
        return load()
    except Exception as error:
        if "GLOBAL" in str(error):
            with suppress(Exception):  # If this fails too, the first error is raised.
                with path.open("rb") as file:
                    names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
                with torch.serialization.safe_globals([(_LeftOut, name) for name in names]):
                    saved = load()
                saved = {key: value for key, value in saved.items() if not _has_objects(value)}
                if any(name for name, _ in state_dicts(saved)):
                    return saved
        raise


def is_state_dict(saved: object) -> bool:
    """Return whether an object is a dict of names to tensors."""
    return isinstance(saved, dict) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in saved.items()
    )


def state_dicts(saved: Any, name: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield each state dict in ``saved``, and the keys that lead to it, joined by dots.

    Optimizer states and dicts of scalars are skipped.
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
    """Verify the checksums of the parts of a zip file, because torch does not."""
    with zipfile.ZipFile(path) as archive:
        # torch maps only uncompressed parts. For a part that is marked as a folder, it may return
        # memory that it did not read.
        if any(part.compress_type or part.external_attr & _FOLDER for part in archive.infolist()):
            raise ValueError("its parts are compressed or folders, which torch.save never writes")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"the checksum of its part {damaged} is wrong: the file is damaged, or was saved after "
            "torch.serialization.set_crc32_options(False)"
        )


def read_tensors(path: Path, must: str, remedy: str, digest: Any = None) -> Any:
    """Return the tensors in a torch.save or safetensors file, on the CPU.

    The first bytes of the file determine its format, not its name. Error messages contain ``must``,
    which says what the file must be, and ``remedy``. If ``digest`` is not None, it is updated with
    the file's bytes, and the checksums in a torch.save file are verified.
    """
    start = b""
    try:
        with path.open("rb") as file:
            start = file.read(64)
        is_zip = start.startswith(_ZIP)
        if is_zip and not zipfile.is_zipfile(path):
            raise EOFError("it begins like a zip file but does not end like one: it was cut off")
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
            f"{path}: {must}. Pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error)}.{begins} {remedy}",
            code="study.tensor_file",
        ) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error from torch or safetensors, without torch's advice."""
    text = str(error) or type(error).__name__
    if unsafe := re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text):
        return f"it contains {unsafe[1].rstrip('.')}"
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else text.splitlines()[0]
    return re.split(r" In PyTorch 2|\(Could this", first)[0].rstrip(". ")


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists, which must be in its folder."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError(f"it must list files of its folder, but lists {listed(names)}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{index}: the index of a checkpoint must be JSON with a mapping `weight_map` of "
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
    """Return a checkpoint's files of weights, and the path of an adapter's config or an index.

    The path is None if there is neither.

    Raises:
        InputError: If a folder contains no weights, or those of both an adapter and a whole model.
    """
    if not checkpoint.exists():
        raise InputError(
            f"{checkpoint}: a checkpoint must exist. Found nothing there.", code="study.no_weights"
        )
    if not checkpoint.is_dir():
        if checkpoint.name in ADAPTER_WEIGHTS:
            raise InputError(
                f"{checkpoint}: a checkpoint of an adapter must be the folder that also contains "
                f"{ADAPTER_CONFIG}. Found its file of weights.",
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
        "process saved a part of the weights, join the parts: with `python -m "
        "torch.distributed.checkpoint.format_utils dcp_to_torch` for FSDP, or DeepSpeed's "
        "`zero_to_fp32.py`.",
        code="study.no_weights",
    )


def refuse_quantized(folder: Path) -> None:
    """Raise an error if the configs in a Hugging Face folder describe quantized weights."""
    names = ("quantize_config.json", "quant_config.json")  # Files of AutoGPTQ and AutoAWQ.
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
