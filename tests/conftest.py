import os
import sys
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parents[1]
# The default study is imported by name where a test needs its functions.
sys.path.insert(0, str(REPOSITORY / "config"))
if not torch.cuda.is_available():
    # Before anything imports numba: the GPU's kernels then run in its simulator.
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")

# Files of minutes come first: no core may wait for one of them at the end.
LONG = ("test_slurm", "test_workflow", "test_tutorial", "test_evaluation_workflow", "test_faults")


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True)
def fixed_randomness():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The small study of `running`, which nothing disturbed."""
    from running import small_study  # only here: most tests need no Snakemake

    study = small_study(tmp_path_factory.mktemp("undisturbed") / "study")
    study.run()
    return study


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A study to spoil."""
    from refusals import study_to_spoil

    return study_to_spoil(tmp_path_factory.mktemp("bad") / "study")


@pytest.fixture(scope="module")
def door(workspace):
    """Snakemake's command, to try a config of that study with."""
    from refusals import open_door

    with open_door(workspace) as door:
        yield door


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of the small study, and its retrained models."""
    from small_run import Run

    torch.set_num_threads(1)
    return Run(tmp_path_factory.mktemp("evaluation"))
