"""Files that decide results: their digests, records and locks.

The lowest versions of h5py and PyTables run this too: each brings an HDF5 of its own.
"""

import os
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest
from no_locks import needs_compiler, without_locks
from patience import run_python
from refused import refused

from trak_core.errors import InputError
from trak_core.runtime import files
from trak_core.runtime.files import (
    data_digests,
    disk_full_error,
    file_digest,
    hold_results,
    path_digests,
    read_record,
    write_record,
)


@pytest.fixture
def folder(here, monkeypatch):
    """Two tables and a picture, changed long ago as far as the module knows."""
    monkeypatch.setattr(files, "CLOCK_NS", 0)
    for name in ("data/a.csv", "data/deep/b.csv", "data/deep/c.png"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    return here


@pytest.fixture
def record(folder):
    return folder / "results/data_files.json"


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that were read."""
    names, read = [], files.file_digest
    monkeypatch.setattr(files, "file_digest", lambda path: (names.append(path.name), read(path))[1])
    return names


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("data/a.csv", ["data/a.csv"]),
        ("data", ["data/a.csv", "data/deep/b.csv", "data/deep/c.png"]),
        ("data/*.csv", ["data/a.csv"]),
        ("data/**/*.csv", ["data/a.csv", "data/deep/b.csv"]),
        ("data/d*", ["data/deep/b.csv", "data/deep/c.png"]),
        ("data/[1].csv", ["data/[1].csv"]),
    ],
)
def test_what_an_entry_names(folder, record, pattern, found):
    if "[" in pattern:
        (folder / pattern).write_text("its name looks like a pattern")
    assert list(data_digests([pattern], record)) == found
    absolute = [str(folder / name) for name in found]
    assert list(data_digests([str(folder / pattern)], record)) == absolute


def test_a_file_is_read_once(folder, record, hashed):
    before = data_digests(["data"], record)
    assert sorted(hashed) == ["a.csv", "b.csv", "c.png"]
    written = record.stat().st_mtime_ns
    assert data_digests(["data"], record) == before
    assert len(hashed) == 3
    assert record.stat().st_mtime_ns == written


def test_what_changed_a_moment_ago_is_not_remembered(folder, record, hashed, monkeypatch):
    """It may change again before the file system's clock moves."""
    monkeypatch.setattr(files, "CLOCK_NS", 60 * 10**9)
    for _ in range(2):
        data_digests(["data/a.csv"], record)
    assert hashed == ["a.csv", "a.csv"]
    now = time.time_ns()
    monkeypatch.setattr(files.time, "time_ns", lambda: now + 61 * 10**9)
    for _ in range(2):
        data_digests(["data/a.csv"], record)
    assert hashed == ["a.csv"] * 3


@pytest.mark.parametrize("entry", ["gone.csv", "data/*.tsv", "empty"])
def test_an_entry_must_name_a_file(folder, record, entry):
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match=r"must match at least one file.* Found nothing at '"):
        data_digests(["data/a.csv", entry], record)


def test_results_and_what_comes_by_itself_do_not_count(folder, record):
    """A job starts while results and caches are there that the first start had not."""
    before = data_digests(["."], record)
    assert "data/a.csv" in before
    for name in ("results/scores.h5", "data/__pycache__/a.pyc", "data/.hidden", ".snakemake/log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("new")
    assert data_digests(["."], record) == before
    with pytest.raises(InputError, match=r"Found nothing at 'results'"):
        data_digests(["results"], record)


def test_files_that_the_system_refuses_have_codes(tmp_path):
    with refused("runtime.unreadable", "Is a directory"):
        file_digest(tmp_path)
    assert disk_full_error(tmp_path / "a.h5", "no room").code == "runtime.disk_full"


@pytest.fixture
def digest(folder, record):
    return lambda path: path_digests([str(path)], record)[str(path)]


def test_a_checkpoint_counts_by_its_content(folder, digest, hashed):
    path = folder / "data/a.csv"
    before = digest(path)
    for _ in range(2):
        assert digest(path) == before
    assert len(hashed) == 1
    path.touch()
    path.chmod(0o400)
    assert digest(path) == before
    other = folder / "other.csv"
    other.write_text("data/x.csv")
    for times in ((1, 1), (path.stat().st_atime, path.stat().st_mtime)):
        os.utime(other, times)
        shutil.copy2(other, path)
        assert digest(path) != before
        path.write_text("data/a.csv")
    assert digest(path) == before


def test_a_folder_counts_by_every_file_in_it(folder, digest):
    seen = {digest("data")}
    for change in ("data/deep/b.csv", "data/deep/new.bin"):
        (folder / change).write_text("new")
        seen.add(digest("data"))
    (folder / "data/deep/new.bin").rename(folder / "data/new.bin")
    seen.add(digest("data"))
    assert len(seen) == 4
    (folder / "data").rename(folder / "moved")
    assert digest("moved") in seen
    (folder / "moved/.hidden").write_text("new")
    assert digest("moved") in seen


KNOWN = {"n_params": 3, "splits": {"train": {"key": "a", "n_samples": 2}}}


def test_a_damaged_record_is_as_good_as_none(tmp_path):
    path = tmp_path / "study.json"
    assert read_record(path) == {}
    write_record(path, KNOWN)
    data = path.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1
        path.write_bytes(flipped)
        assert read_record(path) in ({}, KNOWN)
    for text in ("[]", "3", "{}", '{"known": 3}', "[" * 10**5, data.decode()[:-1]):
        path.write_text(text)
        assert read_record(path) == {}


def test_a_results_folder_is_one_runs(tmp_path):
    code = "from pathlib import Path; from trak_core.runtime.files import hold_results\n"
    code += f"hold_results(Path({str(tmp_path / 'results')!r})); print(1, flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.read(1) == b"1"
        with refused("config.results_in_use", tmp_path / "results"):
            hold_results(tmp_path / "results")
        other.kill()
    hold_results(tmp_path / "results")


USES_LOCKS = """
import fcntl, os
from pathlib import Path
from trak_core.runtime.files import hold_results, lock_tables_where_possible

results = Path("a/results")  # not there yet
lock_tables_where_possible(results)
print(os.environ.get("HDF5_USE_FILE_LOCKING"))
hold_results(results)
import pandas as pd
with open("frame", "w") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked")
    except OSError as error:
        print(os.strerror(error.errno))
pd.DataFrame({"a": [1]}).to_hdf("a/results/a.h5", key="a", format="table")
assert len(pd.read_hdf("a/results/a.h5", "a")) == 1
"""


@needs_compiler
@pytest.mark.parametrize(
    ("error", "setting", "said"),
    [
        ("ENOLCK", "FALSE", "No locks available"),
        ("ENOSYS", "FALSE", "Function not implemented"),
        ("EOPNOTSUPP", "FALSE", "Operation not supported"),
        (None, "None", "locked"),
    ],
)
def test_a_disk_that_knows_no_locks(tmp_path, error, setting, said):
    """PyTables would give up; where there are locks, HDF5 uses them as ever."""
    done = run_python(USES_LOCKS, cwd=tmp_path, env=without_locks(tmp_path / "shim", error))
    assert done.stdout.splitlines() == [setting, said]
    assert not list(tmp_path.glob("a/*.*"))  # what measures the disk leaves nothing


@needs_compiler
def test_a_ground_truth_on_a_disk_of_its_own_that_knows_no_locks(tmp_path):
    pd.DataFrame({"a": [1.0]}).to_hdf(tmp_path / "a.h5", key="a", format="fixed")
    code = "from pathlib import Path; from trak_core.artifacts.read import read_frame\n"
    code += "assert read_frame(Path('a.h5'), 'a')[0].tolist() == [[1.0]]"
    run_python(code, cwd=tmp_path, env=without_locks(tmp_path / "shim"))
