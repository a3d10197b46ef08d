"""A checkpoint that is replaced is told, also by a file of its size and time."""

import os
import shutil
from zipfile import ZipFile, ZipInfo

import pytest
import torch
from safetensors.torch import save_file

from trak_core.dependency_digests import stat_signature
from trak_core.system import checkpoint_signatures as module
from trak_core.system.checkpoint_signatures import CheckpointSignatures, parts_digest


@pytest.fixture
def signature(tmp_path, monkeypatch):
    """What a further start says of a checkpoint, which was changed long ago as far as it knows."""
    monkeypatch.setattr(module, "CLOCK_NS", 0)

    def start(path):
        signatures = CheckpointSignatures(tmp_path / "results/checkpoints.json")
        signature = signatures.of(path)
        signatures.write()
        return signature

    return start


@pytest.fixture
def reads(monkeypatch):
    """Names of what was read."""
    names, read = [], module.parts_digest

    def named(path):
        names.append(path.name)
        return read(path)

    monkeypatch.setattr(module, "parts_digest", named)
    return names


def replace(path, other):
    """Put another file in a file's place, as `cp -p` does with one of the same time."""
    stat = path.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.copy2(other, path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def test_a_file_of_the_same_size_and_time(tmp_path, signature, reads):
    path, other, first = (tmp_path / name for name in ("c.pt", "other.pt", "first.pt"))
    path.write_bytes(b"1234")
    other.write_bytes(b"1235")
    shutil.copy2(path, first)
    plain = stat_signature(path)
    # As it was before there was a record: results of earlier versions stay.
    assert signature(path) == signature(path) == plain
    assert reads == ["c.pt"]
    replace(path, other)
    replaced = signature(path)
    assert replaced != plain == stat_signature(path)
    assert signature(path) == replaced
    assert reads == ["c.pt"] * 2
    replace(path, first)
    assert signature(path) == plain


def test_a_change_of_rights_or_a_link_changes_nothing(tmp_path, signature, reads):
    path = tmp_path / "c.pt"
    path.write_bytes(b"1234")
    before = signature(path)
    path.chmod(0o400)
    (tmp_path / "linked.pt").hardlink_to(path)
    assert signature(path) == before
    assert reads == ["c.pt"] * 2
    path.touch()
    assert signature(path) == stat_signature(path) != before


def test_a_file_that_cannot_be_read_keeps_its_size_and_time(tmp_path, signature, monkeypatch):
    path = tmp_path / "c.pt"
    path.write_bytes(b"1234")

    def refuse(path):
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(module, "parts_digest", refuse)
        assert signature(path) == stat_signature(path)
    assert signature(path) == stat_signature(path)


def test_a_file_of_a_folder(tmp_path, signature):
    folder, other = tmp_path / "saved", tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1234")
    other.write_bytes(b"1235")
    before = signature(folder)
    replace(folder / "model.safetensors", other)
    assert signature(folder) != before


@pytest.mark.parametrize("times", ["whole seconds", "just now"])
def test_where_the_file_system_tells_nothing_parts_are_read_at_each_start(
    tmp_path, signature, reads, monkeypatch, times
):
    path = tmp_path / "c.pt"
    path.write_bytes(b"1234")
    if times == "just now":
        monkeypatch.setattr(module, "CLOCK_NS", 60 * 10**9)
    else:
        monkeypatch.setattr(module, "_SECOND_NS", 1)
    assert signature(path) == signature(path)
    assert reads == ["c.pt"] * 2


def test_a_lost_record_has_a_replaced_checkpoint_count_by_size_and_time(tmp_path, signature):
    path, other = tmp_path / "c.pt", tmp_path / "other.pt"
    path.write_bytes(b"1234")
    other.write_bytes(b"1235")
    signature(path)
    replace(path, other)
    assert signature(path) != stat_signature(path)
    (tmp_path / "results/checkpoints.json").write_text("{")
    assert signature(path) == stat_signature(path)


def weights(changed=None):
    """Some 9 MB in tensors of all sizes; a number of one of them is another."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (1024, 1024), "b": (7,), "c": (1024, 1024), "d": (3, 5), "e": (300, 1000)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if changed is not None:
        tensors[changed].view(-1)[tensors[changed].numel() // 2] += 1
    return tensors


@pytest.mark.parametrize("changed", [*"abcde"])
@pytest.mark.parametrize("save", [save_file, torch.save])
def test_a_large_file_is_told_by_parts_of_it(tmp_path, save, changed):
    """A number in the middle of any tensor counts; in a file of torch's any number would."""
    digests = []
    for name in (None, changed):
        save(weights(name), tmp_path / "c.pt")
        digests.append(parts_digest(tmp_path / "c.pt"))
    assert digests[0] != digests[1]


def test_any_number_of_a_large_file_of_torch_counts(tmp_path):
    path, digests = tmp_path / "c.pt", set()
    for place in (None, *range(1000, 2**20, 99_991)):
        tensors = weights()
        if place is not None:
            tensors["c"].view(-1)[place] += 1
        torch.save(tensors, path)
        digests.add(parts_digest(path))
    assert len(digests) == 1 + len(range(1000, 2**20, 99_991))


def test_a_large_plain_file_is_told_by_its_ends_and_64_parts(tmp_path):
    """What lies between the parts is not read."""
    size = 2**21 + 77
    content = bytes(size)
    path = tmp_path / "c.bin"

    def digest_with(place):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        return parts_digest(path)

    path.write_bytes(content)
    before = parts_digest(path)
    parts = [i * (size - 2**12) // 64 for i in range(64)]
    seen = [0, 2**16 - 1, size - 2**16, size - 1, *parts, *(start + 2**12 - 1 for start in parts)]
    digests = {place: digest_with(place) for place in seen}
    assert before not in digests.values()
    # The same bit everywhere: each place is another change.
    assert len(set(digests.values())) == len(digests)
    read = {*range(2**16), *range(size - 2**16, size)}
    read.update(*(range(start, start + 2**12) for start in parts))
    unread = [start + 2**14 for start in parts if start + 2**14 not in read]
    assert len(unread) > 50
    assert {digest_with(place) for place in unread} == {before}


@pytest.mark.parametrize("size", [2**20, 2**20 + 1])
def test_a_file_up_to_a_mebibyte_counts_whole(tmp_path, size):
    path, digests = tmp_path / "c.bin", set()
    for byte in (0, 1):
        content = bytearray(size)
        content[2**16 + 2**13] = byte  # behind the first end, between two parts
        path.write_bytes(content)
        digests.add(parts_digest(path))
    assert len(digests) == (2 if size == 2**20 else 1)


def test_any_byte_of_a_large_zip_file_counts(tmp_path):
    """Python's own has the list of checksums without zip64, which torch's files end with."""
    path, digests = tmp_path / "c.pt", set()
    for place in (None, *range(70_000, 2**21, 99_991)):
        content = bytearray(2**21)
        if place is not None:
            content[place] = 1
        with ZipFile(path, "w") as file:
            file.writestr(ZipInfo("c/data/0"), content)
        end = path.read_bytes()[-200:]
        assert b"PK\x05\x06" in end
        assert b"PK\x06\x06" not in end
        digests.add(parts_digest(path))
    assert len(digests) == 1 + len(range(70_000, 2**21, 99_991))


def test_another_choice_of_parts_is_no_other_checkpoint(tmp_path, signature, monkeypatch):
    path = tmp_path / "c.pt"
    path.write_bytes(b"1234")
    plain = signature(path)
    read = module.parts_digest
    monkeypatch.setattr(module, "parts_digest", lambda path: f"{read(path)[:-1]}-")
    path.chmod(0o400)  # the file system says that something changed
    monkeypatch.setattr(module, "_CHOICE", module._CHOICE + 1)
    assert signature(path) == plain
    path.chmod(0o600)
    monkeypatch.setattr(module, "parts_digest", read)
    assert signature(path) != plain  # which is what a forgotten number would do


@pytest.mark.parametrize(
    "start",
    [
        (2**23).to_bytes(8, "little") + b"{" + b"[" * 1000,
        (2**63).to_bytes(8, "little") + b"{}",
        (30).to_bytes(8, "little") + b'{"a":{"data_offsets":[9e99,3]}}',
        (37).to_bytes(8, "little") + b'{"a":{"data_offsets":[-99999999,-1]}}',
        b"PK\x03\x04",
    ],
)
def test_a_damaged_large_file_has_a_digest(tmp_path, start):
    path = tmp_path / "c.pt"
    end = b"PK\x05\x06" + b"\xff" * 18
    path.write_bytes(start.ljust(2**21, b"\0") + end)
    assert len(parts_digest(path)) == 32
