import gc
import os
import sys
from pathlib import Path

# Workers share the cores: NumPy's threads would wait for each other, and busily. Before its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

REPOSITORY = Path(__file__).parents[1]
# The default study is imported by name where a test needs its functions.
sys.path.insert(0, str(REPOSITORY / "config"))

# Files whose tests take long come first: what idle workers take from others is at the end.
LONG = (
    "test_slurm",
    "test_tutorial",
    "test_language_models",
    "test_readme",
    "test_workflow",
    "test_evaluation_workflow",
    "test_workflow_own",
    "test_faults",
    "test_no_room",
)


def pytest_configure(config):
    """Where tests run: what only hands them to workers needs no torch, which takes seconds."""
    if config.getoption("numprocesses", None):
        return
    import torch

    if not torch.cuda.is_available():
        # Before anything imports numba: the GPU's kernels then run in its simulator.
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


def pytest_collection_modifyitems(items):
    place = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    # Garbage is sought less often, and not among what lives as long as the process, some hundred
    # thousand objects: that took a tenth of all time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_sessionfinish():
    if "workspace" in sys.modules:
        sys.modules["workspace"].stop_forked_python()


@pytest.fixture(autouse=True)
def fixed_randomness():
    import torch

    # `torch.manual_seed` would write down where it was called, for each kind of device that is not
    # in use: 2 ms a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def notices_are_printed_again():
    if "trak_core.ready_made.ready_study" in sys.modules:
        sys.modules["trak_core.ready_made.ready_study"].notice.cache_clear()


@pytest.fixture
def float64():
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The test's own folder, as the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Imports within fixtures: most tests need no Snakemake, and the lowest versions no filelock.


@pytest.fixture(scope="session")
def built_once(tmp_path_factory):
    """Return a study from its name and its builder; it is built once for all workers."""
    import base_studies

    return lambda name, build: base_studies.built_once(tmp_path_factory, name, build)


@pytest.fixture(scope="session")
def trained(built_once):
    """Three networks that the pipeline trained, two experiments; `all` ran."""
    from base_studies import train_and_score

    return built_once("trained", train_and_score)


@pytest.fixture(scope="session")
def evaluated(built_once, trained):
    """Two of those networks and one experiment, evaluated in all ways; `all` ran."""
    from base_studies import evaluate

    return built_once("evaluated", lambda folder: evaluate(trained, folder))


@pytest.fixture(scope="session")
def own(built_once):
    """A regression with three checkpoints of a user's own, two experiments; `scores` ran."""
    from base_studies import score_own

    return built_once("own", score_own)


@pytest.fixture(scope="session")
def finished(built_once):
    """The small study of `running`, which nothing disturbed."""
    from base_studies import undisturbed

    return built_once("undisturbed", undisturbed)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A study to spoil."""
    from refusals import study_to_spoil

    return study_to_spoil(tmp_path_factory.mktemp("bad") / "study")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A finished run of the small study, and its retrained models."""
    import torch
    from small_run import Run

    torch.set_num_threads(1)
    return Run(tmp_path_factory.mktemp("evaluation"))
