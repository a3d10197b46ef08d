"""A disk that knows no locks, for a process: each `flock` fails, as on some network disks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="a C compiler makes a disk without locks"
)


def without_locks(folder: Path, error: str | None = "ENOLCK") -> dict[str, str]:
    """Return the environment of a process without locks; with None it is one that has them."""
    environment = {k: v for k, v in os.environ.items() if k != "HDF5_USE_FILE_LOCKING"}
    if error is None:
        return environment
    source = f"#include <errno.h>\nint flock(int f, int o) {{ errno = {error}; return -1; }}\n"
    folder.mkdir(exist_ok=True)
    (folder / "shim.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "shim.so", "shim.c"], cwd=folder, check=True)
    return environment | {"LD_PRELOAD": str(folder / "shim.so")}
