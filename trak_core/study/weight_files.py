"""Find the files of a checkpoint's weights, read them safely, explain why one is unreadable.

PyTorch files are read with ``weights_only=True``, the others are safetensors.
"""

import json
import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from trak_core.errors import InputError, came_from_no_memory, listed
from trak_core.spec import ADAPTER_CONFIG

# How files of torch.save begin: since 1.6 as a zip file, before as a pickle.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
# And safetensors, from their eighth byte on: eight bytes of a length, then JSON.
_SAFETENSORS = b"\0{"
_ZIP_HEADER_BYTES = 30  # before each part; the lengths of a name and of extras end it
_FOLDER = 0x10  # among a zip entry's attributes
_AGAIN = "Copy it again."
# A header of a million names takes 2 GB and a minute to read; this is of some 100,000.
_MOST_HEADER_BYTES = 2**24
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
# Tensors that are no weights, by the function that makes them of what a file's pickle says.
_OTHER_TENSORS = {
    "_rebuild_qtensor": "quantized tensors. Save the weights that training left, in floating point",
    "_rebuild_meta_tensor_no_storage": (
        "meta tensors, which have no numbers. Save a model whose weights are loaded"
    ),
    "_rebuild_nested_tensor": "nested tensors. Save weights as tensors of one shape each",
    "torch.distributed.tensor\nDTensor": (
        "tensors in pieces, one for each process. Save whole ones, "
        "`torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True))`"
    ),
}
# What torch and safetensors say of a file that ends too early.
_CUT = re.compile(r"unexpected EOF|invalid header length|incomplete metadata")


class _UnreadableError(Exception):
    """Says in sentences what is wrong with a file, and what to do."""


class _MappedFile(mmap.mmap):
    """A file in the system's memory alone: torch fills tensors from it without another copy."""

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        with memoryview(self) as data:
            n_bytes = min(len(view), max(len(data) - self.tell(), 0))
            view[:n_bytes] = data[self.tell() : self.tell() + n_bytes]
        self.seek(n_bytes, os.SEEK_CUR)
        return n_bytes


def _parts(file: BinaryIO) -> list[tuple[int, zipfile.ZipInfo]]:
    """Return where each part of a PyTorch file begins, in order; none of their bytes is read.

    A file whose parts would be larger than itself is not unpacked. torch would return memory that
    nothing was read into for a part that is marked as a folder.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
            raise _UnreadableError(
                "its parts are larger than the file: torch.save never compresses. Save it by "
                "torch.save."
            )
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _UnreadableError(
                "its parts are compressed: torch.save never does that. Save it by torch.save."
            )
        if any(entry.external_attr & _FOLDER or entry.is_dir() for entry in entries):
            raise _UnreadableError(f"a part is a folder: the file is damaged. {_AGAIN}")
        parts, stop = [], 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            header = os.pread(file.fileno(), _ZIP_HEADER_BYTES, entry.header_offset)
            if entry.header_offset < stop or not header.startswith(_ZIP):
                raise zipfile.BadZipFile(f"{entry.filename} is not where it says")
            lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:], "little")
            start = entry.header_offset + _ZIP_HEADER_BYTES + sum(lengths)
            parts.append((start, entry))
            stop = start + entry.file_size
    except zipfile.BadZipFile as error:
        # Python's one complaint of a file that doesn't end as zip files do; others are of its list.
        if str(error) == "File is not a zip file":
            raise _UnreadableError(
                f"it begins as a zip file and doesn't end as one: it was cut off. {_AGAIN}"
            ) from error
        raise _UnreadableError(f"the list of its parts is damaged: {error}. {_AGAIN}") from error
    return parts


def _check_pickle(mapped: mmap.mmap, parts: Sequence[tuple[int, zipfile.ZipInfo]]) -> None:
    """Refuse tensors that are no weights: torch reads them, or fails in words of its own."""
    pickles = [(start, entry) for start, entry in parts if entry.filename.endswith("/data.pkl")]
    spans = [(start, start + entry.file_size) for start, entry in pickles] or [(0, len(mapped))]
    for name, kind in _OTHER_TENSORS.items():
        if any(mapped.find(name.encode(), *span) >= 0 for span in spans):
            raise _UnreadableError(f"it holds {kind}.")


def _digest(
    mapped: _MappedFile,
    parts: Sequence[tuple[int, zipfile.ZipInfo]],
    update: Callable[[memoryview], None],
) -> None:
    """Digest all bytes in order, and compare the checksums of parts, which torch doesn't."""
    end = 0
    with memoryview(mapped) as data:
        for start, entry in parts:
            stop = start + entry.file_size
            update(data[end:start])
            update(data[start:stop])
            if zlib.crc32(data[start:stop]) != entry.CRC:
                raise _UnreadableError(
                    f"the checksum of its part {entry.filename} differs: the file is damaged, or "
                    "was saved after torch.serialization.set_crc32_options(False). Copy it again, "
                    "or save it with checksums."
                )
            end = stop
        update(data[end:])


def _kind(start: bytes, remedy: str) -> str:
    """Return the kind of a file that begins so: ``safetensors``, ``zip``, or torch's old one."""
    if start[7:9] == _SAFETENSORS:
        return "safetensors"
    if start.startswith(_ZIP):
        return "zip"
    if start.startswith(_PICKLE):
        return "pickle"
    if not start.strip(b"\0"):
        raise _UnreadableError(f"it {'begins with zeros alone' if start else 'is empty'}. {_AGAIN}")
    if start.startswith(b"version https://git-lfs"):
        raise _UnreadableError(
            "it is a pointer of Git LFS. Fetch the file itself by `git lfs pull`."
        )
    raise _UnreadableError(
        f"it begins with {start}, as neither torch.save's files nor safetensors do. {remedy}"
    )


def _check_header(file: BinaryIO) -> None:
    """Refuse safetensors whose list of tensors would take long to read, and much memory."""
    n_bytes = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if _MOST_HEADER_BYTES < n_bytes < os.fstat(file.fileno()).st_size:
        raise _UnreadableError(
            f"its list of tensors has {n_bytes} bytes, more than {_MOST_HEADER_BYTES}, which is "
            "some 100,000 tensors. Save the weights in several files, with an index."
        )


def _reason(error: Exception, remedy: str) -> str:
    """Return what a reader of tensors complains of, without the advice of torch, and what to do."""
    if isinstance(error, _UnreadableError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}. Give a file that may be read."
    text = str(error)
    if isinstance(error, EOFError | LookupError) or _CUT.search(text):
        return f"it was cut off, or is damaged. {_AGAIN}"
    other = re.search(r"(?:global:|unsupported) GLOBAL (\S+)", text)
    if other and other[1].startswith("numpy"):
        return (
            f"it holds numbers or arrays of numpy ({other[1].rstrip('.')}). Save tensors and "
            "Python's numbers in their place: `torch.from_numpy(array)`, `number.item()`."
        )
    unpickler = re.search(r"WeightsUnpickler error:\s+(.+)", text)
    first = unpickler[1] if unpickler else (text.splitlines() or [type(error).__name__])[0]
    if first.startswith("Unsupported operand"):
        return (
            "its pickle is none of torch.save's own protocol; `pickle.dump` writes such files, of "
            "numpy's numbers for one. Save tensors by torch.save: `torch.save({name: "
            "torch.as_tensor(value), ...}, path)`."
        )
    reason = f"it holds {other[1]}" if other else re.split(r" In PyTorch 2|\(Could this", first)[0]
    return f"{reason.rstrip('. ')}. {remedy}"


@contextmanager
def _explained(path: Path, must: str, remedy: str) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        if came_from_no_memory(error):
            raise
        # What a broken file makes of its reader is open-ended: any error is the file's.
        raise InputError(
            f"{path}: {must}; pickled objects other than tensors are never loaded. Reading it "
            f"failed: {_reason(error, remedy)}",
            code="study.tensor_file",
        ) from error


class _LeftOut:
    """Stands for an object of a file: neither its class nor its code is looked for."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _load(file: Any, place: str) -> Any:
    """Return what torch reads; of a larger dict around weights without entries that hold objects.

    Lightning's files have hyper-parameters beside the weights, others the arguments of a training.
    """
    try:
        return torch.load(file, map_location=place, weights_only=True)
    except Exception as error:
        if "GLOBAL" in str(error):
            # What this fails at too is told as it was before.
            with suppress(Exception):
                file.seek(0)
                names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
                file.seek(0)
                with torch.serialization.safe_globals([(_LeftOut, name) for name in names]):
                    saved = torch.load(file, map_location=place, weights_only=True)
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


def read_tensors(path: Path, must: str, remedy: str, update: Callable[[memoryview], None]) -> Any:
    """Return what a file holds, tensors and nothing that would run code, on the CPU.

    The process never holds a file of ``torch.save`` beside its tensors: the file is mapped, so that
    checksums, digest and tensors share what the system read from the disk. The tensors of
    safetensors are themselves a map of the file. Its first bytes tell which it is, not its name.
    ``update``, the method of a hash, gets the file's bytes, in order.

    An ``InputError`` of a file that cannot be read, or is damaged, says what it ``must`` be; the
    ``remedy`` is for one that is whole and holds something else.
    """
    with _explained(path, must, remedy), path.open("rb") as file:
        kind = _kind(file.read(32), remedy)
        parts = _parts(file) if kind == "zip" else []
        with _MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if kind == "safetensors":
                _check_header(file)
            _digest(mapped, parts, update)
            if kind == "safetensors":
                return load_file(path)
            _check_pickle(mapped, parts)
            # A file, not its path, because torch looks at a path's ending.
            return _load(mapped, "cpu")


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do; one that can't be read is left to who reads it."""
    try:
        with path.open("rb") as file:
            return file.read(9)[7:] == _SAFETENSORS
    except OSError:
        return False


def stream_tensors(
    path: Path,
    must: str,
    remedy: str,
    update: Callable[[memoryview], None],
    like: Mapping[str, Tensor],
    places: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a safetensors file one at a time, in the order in which they lie.

    The process holds no more of the file than one tensor. Further arguments than those of
    ``read_tensors`` are ``like``, what ``read_shapes`` returned, and ``places``, where tensors are
    read into that have the dtype, shape and memory of the file's.

    Yields:
        Name and tensor: that of ``places``, or a new one on the CPU.
    """
    with path.open("rb", buffering=0) as file:
        with _explained(path, must, remedy):
            start = _filled(file, bytearray(8))
            header = _filled(file, bytearray(int.from_bytes(start, "little")))
            update(start)
            update(header)
            entries = json.loads(bytes(header))
        entries.pop("__metadata__", None)
        for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
            wanted, place = like[name], places.get(name)
            if place is None or not _is_same_kind(place, wanted):
                place = torch.empty(wanted.shape, dtype=wanted.dtype)
            with _explained(path, must, remedy):
                update(_filled(file, place.detach().reshape(-1).view(torch.uint8).numpy().data))
            yield name, place


def _is_same_kind(place: Tensor, wanted: Tensor) -> bool:
    same = (place.dtype, place.shape, place.device) == (wanted.dtype, wanted.shape, wanted.device)
    return same and place.is_contiguous()


def _filled(file: IO[bytes], buffer: bytearray | memoryview) -> memoryview:
    """Read as many bytes as a buffer has."""
    view = memoryview(buffer)
    n_read = 0
    while n_read < len(view):
        n_more = file.readinto(view[n_read:])  # pyright: ignore[reportAttributeAccessIssue]
        if not n_more:
            raise EOFError
        n_read += n_more
    return view


def read_shapes(path: Path, must: str, remedy: str) -> Any:
    """Return what ``read_tensors`` would, with tensors of shape and dtype and no numbers to read.

    That is cheap, however large the file is; checksums are not compared. None for a file of torch
    before 1.6, which can only be read whole.
    """
    with _explained(path, must, remedy), path.open("rb") as file:
        kind = _kind(file.read(32), remedy)
        if kind == "safetensors":
            _check_header(file)
            return load_file(path)  # mapped, and not touched
        if kind == "pickle":
            return None
        parts = _parts(file)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            _check_pickle(mapped, parts)
        file.seek(0)
        return _load(file, "meta")


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
