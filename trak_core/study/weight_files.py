"""Load weights from files safely, explain why one is unreadable, and fit PEFT's adapters in.

PyTorch files are read with ``weights_only=True``, the rest is safetensors. A folder of
``PeftModel.save_pretrained`` holds the adapter's weights and, in its config, the settings that say
what they mean: the same numbers under another ``lora_alpha`` are another model. peft itself names
the weights and puts them in; only such a folder imports it.
"""

import json
import mmap
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trak_core.errors import InputError, came_from_no_memory

# How files of torch.save begin: since 1.6 as a zip file, before as a pickle.
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
# And safetensors, from their eighth byte on: eight bytes of a length, then JSON.
_SAFETENSORS = b"\0{"
_ZIP_HEADER_BYTES = 30  # before each part; the lengths of a name and of extras end it
_FOLDER = 0x10  # among a zip entry's attributes
_AGAIN = "Copy it again."
# A header of a million names takes 2 GB and a minute to read; this is of some 100,000.
_MOST_HEADER_BYTES = 2**24
# Tensors that are no weights, by the function that makes them of what a file's pickle says.
_OTHER_TENSORS = {
    "_rebuild_qtensor": "quantized tensors. Save the weights that training left, in floating point",
    "_rebuild_meta_tensor_no_storage": (
        "meta tensors, which have no numbers. Save a model whose weights are loaded"
    ),
    "_rebuild_nested_tensor": "nested tensors. Save weights as tensors of one shape each",
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
            return torch.load(cast(IO[bytes], mapped), map_location="cpu", weights_only=True)


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do."""
    with path.open("rb") as file:
        return file.read(9)[7:] == _SAFETENSORS


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
        return torch.load(file, map_location="meta", weights_only=True)


ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Settings that say where an adapter comes from and how it was trained. No number depends on them.
_TRAINING_SETTINGS = frozenset({
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *("megatron_config", "megatron_core"),
})
# Settings that determine which weights exist. Keys and shapes are compared instead, because there
# are many ways to write one choice of layers.
_LAYER_SETTINGS = frozenset({
    *("bias", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_modules", "target_parameters"),
})
# Initializations that leave the base's weights as they are; PiSSA, OLoRA and others change them.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The active adapter of a PeftModel, with its name in it."""

    model: Any
    name: str

    @classmethod
    def of(cls, model: nn.Module, folder: Path) -> Self:
        """Return the adapter of ``model`` that a folder's weights are for: its only active one."""
        try:
            from peft import PeftModel
        except ImportError as error:
            raise InputError(
                f"{folder}: for an adapter's folder as a checkpoint, peft must be installed. "
                f"Importing it failed: {error}. `python -m pip install peft`, into the environment "
                "that jobs run in.",
                code="study.adapter_peft",
            ) from error
        if not isinstance(model, PeftModel):
            raise InputError(
                f"{folder}: for an adapter's folder as a checkpoint, make_model() must return a "
                f"peft.PeftModel: the base with its weights and the adapter's layers. Found "
                f"{type(model).__name__}. Return `PeftModel.from_pretrained(base, folder)`, or "
                "`get_peft_model(base, config)` with the config of the training.",
                code="study.adapter_model",
            )
        active = model.active_adapters
        if len(active) != 1:
            raise InputError(
                f"{folder}: one adapter must be active in the PeftModel that make_model() returns; "
                f"it gets the checkpoint's weights. Found {', '.join(active) or 'none'} of "
                f"{', '.join(model.peft_config)}. Call `model.set_adapter(name)`.",
                code="study.adapter_active",
            )
        return cls(model, active[0])

    def weights(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's own adapter weights, by the names that they are stored under.

        They have the base's embeddings if ``stored`` has: peft saves those of a longer vocabulary.
        """
        from peft import get_peft_model_state_dict

        own_under = partial(get_peft_model_state_dict, self.model, adapter_name=self.name)
        own = own_under(save_embedding_layers=False)
        if stored.keys() <= own.keys() or not hasattr(self.model, "get_input_embeddings"):
            return own
        more = own_under(save_embedding_layers=True)
        return {key: value for key, value in more.items() if key in own or key in stored}

    def put(self, stored: Mapping[str, Tensor]) -> None:
        """Put in weights with the keys and shapes of ``weights``; the same must come out again."""
        from peft import set_peft_model_state_dict

        # Some versions of peft rename the keys of what they are given.
        set_peft_model_state_dict(self.model, dict(stored), adapter_name=self.name)
        own = self.weights(stored)
        lost = [k for k, v in stored.items() if not torch.equal(own[k].cpu(), v.to(own[k].dtype))]
        if lost:
            raise InputError(
                "An adapter's weights must be in the model once peft has put them there. Found "
                f"others in {', '.join(lost[:8])}. Save the whole model's state_dict() in place of "
                "the adapter's folder."
            )

    def other_settings(self, config: Path) -> tuple[list[str], list[str]]:
        """Return in words an ``adapter_config.json``'s settings that the model has not.

        Returns those that decide numbers; and those that determine which weights exist, whose
        difference is harmless where keys and shapes fit.
        """
        own = self.model.peft_config[self.name]
        stored = _read(config)
        saved, mine = _plain(_as_peft_reads(stored, own, config)), _plain(own.to_dict())
        differing = {
            key: f"{key} {saved[key]!r} for {mine[key]!r}"
            for key in sorted(saved)
            if key not in _TRAINING_SETTINGS and saved[key] != mine[key]
        }
        # Settings of a newer peft; those that are off change nothing.
        unknown = {
            key: f"{key} {value!r}, which this version of peft doesn't know: install a newer one"
            for key, value in stored.items()
            if value and key not in mine and key not in _TRAINING_SETTINGS
        }
        of_layers = [text for key, text in differing.items() if key in _LAYER_SETTINGS]
        of_numbers = [t for key, t in (differing | unknown).items() if key not in _LAYER_SETTINGS]
        return of_numbers, of_layers


def _read(config: Path) -> dict[str, Any]:
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or not isinstance(stored.get("peft_type"), str):
            raise ValueError("it has no `peft_type`")
        return stored
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{config}: an adapter's config must be JSON, as PeftModel.save_pretrained writes it. "
            f"Reading it failed: {error}. Save the adapter again.",
            code="study.adapter_config",
        ) from error


def _as_peft_reads(stored: dict[str, Any], own: Any, config: Path) -> dict[str, Any]:
    """Return saved settings with peft's defaults for those that an older version didn't have."""
    if stored["peft_type"] != own.peft_type.value:
        raise InputError(
            f"{config}: an adapter must be of the kind that make_model() builds. Found peft_type "
            f"{stored['peft_type']} for {own.peft_type.value}. Build the model with the config of "
            "the training: `PeftConfig.from_pretrained(folder)`.",
            code="study.adapter_kind",
        )
    known = {key: value for key, value in stored.items() if key in own.to_dict()}
    try:
        return type(own)(**known).to_dict()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{config}: peft must be able to read an adapter's config. It failed: {error}. Save "
            "the adapter again, or install the version of peft that it was saved with.",
            code="study.adapter_config",
        ) from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them, sets sorted, so that equal ones are equal."""

    def plain_value(value: Any) -> Any:
        return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)

    plain = json.loads(json.dumps(dict(settings), default=plain_value))
    for key, value in plain.items():
        if key.startswith("init_") and key.endswith("weights") and value in _INITS:
            plain[key] = "the base stays"
    return plain
