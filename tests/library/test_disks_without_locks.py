"""HDF5 locks no file where the disk of the results knows no locks, and locks them elsewhere.

The lowest versions of h5py and PyTables run this too: each brings an HDF5 of its own.
"""

import pandas as pd
import pytest
from no_locks import needs_compiler, without_locks
from patience import run_python

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
