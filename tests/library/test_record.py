import subprocess
import sys

from refused import refused

from trak_core.runtime.files import hold_results, read_record, write_record

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
