"""A full disk or too little memory gives one error and no partial file, and a rerun succeeds."""

import os
import re
import subprocess

import pytest
from running import small_study
from workspace import REPOSITORY, forked_python


@pytest.fixture
def study(tmp_path):
    return small_study(tmp_path / "study")


def mount(*arguments):
    return subprocess.run(("mount", *map(str, arguments)), capture_output=True, check=False)


@pytest.fixture
def small_disk(study):
    """Mount results on a file system of 500 KiB, and yield a function that enlarges it."""
    results = study.path("results")
    results.mkdir()
    if os.geteuid() != 0 or mount("-t", "tmpfs", "-o", "size=500k", "tmpfs", results).returncode:
        pytest.skip("mounting a small disk needs root on Linux, with the right to mount")
    yield lambda: mount("-o", "remount,size=50m", results)
    subprocess.run(("umount", "--lazy", results), check=True)


FULL = (
    r"results/features/c0/train\.h5: the disk must have space for the file\. "
    r"Found: No space left on device, with \d+ MiB"
)


def test_a_full_disk(study, finished, small_disk):
    """Jobs under limits of files and of memory, below, end in the same way as this one."""
    output = study.fail("--cores", "1", "scores")
    assert len(re.findall(r"^\s*Error: ", output, flags=re.M)) == 1, output
    assert re.search(rf"^\s*Error: {FULL}", output, flags=re.M), output
    assert "Traceback (most recent call last)" not in output, output
    assert "SEGV" not in output
    assert not study.path("results/features/c0/train.h5").exists()
    assert not list(study.path("results").rglob(".*.part"))
    small_disk()
    study.run()
    assert study.artifacts() == finished.artifacts()


WRITERS = {
    "torch": "import torch\n    with atomic_write(path) as p, p.open('wb') as f:\n"
    "        torch.save({'a': torch.zeros(10**5)}, f)",
    "pandas": "import pandas\n    from trak_core.artifacts import SCORES, create\n"
    "    with create(path, SCORES, {}, {}) as writer:\n"
    "        for name in ('train', 'targets'):\n"
    "            writer.table(name, pandas.DataFrame({'id': range(10**5)}), ['id'])",
    "text": "with atomic_write(path) as p:\n        p.write_text('a' * 10**6)",
    "h5py": "import h5py, numpy\n    with atomic_write(path) as p, h5py.File(p, 'w') as f:\n"
    "        f['a'] = numpy.zeros(10**6)",
}


def run_job(body, folder, kilobytes=None):
    """Run a job's body as scripts do; return its exit status, log and terminal output."""
    code = (
        "import resource\nfrom pathlib import Path\nfrom trak_core.runtime.job import logged_to\n"
        "from trak_core.runtime.files import atomic_write\n"
        f"path = Path({str(folder / 'file')!r})\n"
    )
    if kilobytes is not None:
        limit = kilobytes * 1000
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    code += f"with logged_to({str(folder / 'log')!r}):\n    {body}\n"
    program = folder.with_suffix(".py")
    program.write_text(code)
    result = subprocess.run(
        (forked_python(), program),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "check": False},
    )
    return result.returncode, (folder / "log").read_text(), result.stdout


@pytest.mark.parametrize("library", WRITERS)
def test_whatever_library_writes_the_error_is_the_same(tmp_path, library):
    status, log, _ = run_job(WRITERS[library], tmp_path, kilobytes=100)
    assert status == 1
    assert re.search(
        r"^Error: \S*/file: the disk must have space for the file\. Found: (File too large|the "
        r"table train differs from what was written), with \d+ MiB free\. The partial file was "
        r"deleted\. Free some space, .* run snakemake again",
        log,
        flags=re.M,
    ), log
    assert "Traceback" not in log
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_a_log_that_does_not_fit_sends_its_error_to_the_terminal(tmp_path):
    status, log, terminal = run_job("print('x' * 2000, flush=True)", tmp_path, kilobytes=1)
    assert status == 1
    assert len(log) == 1000
    assert re.fullmatch(
        r"Error: the disk must have space for a job's files and log\. Found: File too large\. .*\n",
        terminal,
    )


@pytest.mark.parametrize(
    "body",
    ["bytearray(1 << 60)", *(f"import {lib}; {lib}.empty(1 << 55)" for lib in ("numpy", "torch"))],
)
def test_every_library_s_lack_of_memory_is_explained(tmp_path, body):
    status, log, _ = run_job(body, tmp_path)
    assert status == 1
    assert re.fullmatch(
        r"Error: the job must have enough memory\. It ran out of memory: \S.* Lower "
        r"compute\.memory_mb, .*--set-resources RULE:mem_mb=.*\n",
        log,
    ), log
