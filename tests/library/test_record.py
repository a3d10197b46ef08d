import fcntl
import os
import subprocess
import sys

import pytest
from refused import refused

from trak_core.errors import InputError
from trak_core.runtime.files import hold_results, read_record, write_record

KNOWN = {"n_params": 3, "splits": {"train": {"key": "a", "n_samples": 2}}}


def test_what_is_written_is_read(tmp_path):
    write_record(tmp_path / "results/study.json", KNOWN)
    assert read_record(tmp_path / "results/study.json") == KNOWN


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


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file: the results folder must .* Found File exists"):
        write_record(tmp_path / "file/study.json", KNOWN)


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


def test_a_colleagues_lock_is_one_too(tmp_path):
    """The file may only be read; root, who may do anything, becomes nobody."""
    lock = tmp_path / "results/.lock"
    lock.parent.mkdir()
    lock.touch(mode=0o444)
    code = "import os; from pathlib import Path; from trak_core.runtime.files import hold_results\n"
    code += "import fcntl; os.getuid() or os.setuid(65534)\n"
    code += "hold_results(Path('results'))\n"
    command = [sys.executable, "-c", code]
    for folder in (tmp_path, lock.parent):
        folder.chmod(0o777)
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "written to by one run at a time" in held.stderr


# Root may write anywhere; nobody may not.
AS_NOBODY = """
import os, sys
from pathlib import Path
from trak_core.errors import InputError
from trak_core.runtime.files import check_results, write_record
if os.getuid() == 0:
    os.setuid(65534)
try:
    if sys.argv[1:]:
        check_results(Path("results"))
    else:
        write_record(Path("results/study.json"), {"a": 1}, must=False)
except InputError as error:
    print(error.code, error)
"""


def as_nobody(folder, *arguments):
    command = [sys.executable, "-c", AS_NOBODY, *arguments]
    folder.chmod(0o755)
    pipes = {"stdout": subprocess.PIPE, "text": True}
    return subprocess.run(command, cwd=folder, check=True, **pipes).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can have a file of somebody else")
def test_a_record_of_somebody_else_is_no_folder_that_may_only_be_read(tmp_path):
    """In a folder such as /tmp only a file's owner may replace it."""
    results = tmp_path / "results"
    results.mkdir()
    (results / "study.json").write_text("{}")
    results.chmod(0o555)
    assert as_nobody(tmp_path) == ""
    results.chmod(0o1777)
    said = as_nobody(tmp_path)
    assert said.startswith("config.results_folder results: the results folder must be")
    assert "Found Operation not permitted at results/study.json. Make the folder writable" in said
    assert [path.name for path in results.iterdir()] == ["study.json"]


def test_a_folder_that_takes_no_file_is_named_itself(tmp_path):
    (tmp_path / "results").mkdir(mode=0o555)
    assert "Found Permission denied at results. Make the folder writable" in as_nobody(
        tmp_path, "check"
    )
