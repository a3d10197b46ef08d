"""Several processes on one save_dir lose nothing, and a killed one goes on."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
from compat_models import M, N, Net, checkpoints, tracer
from compat_worker import featurize, score, work
from workspace import REPOSITORY

from trak_core.compat.savers import ModelIDException

STATES = checkpoints(Net, 3)


@pytest.fixture(scope="module")
def start():
    """Start a worker: a fork of a process that has imported everything and done nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(REPOSITORY / "tests/support"), str(REPOSITORY)])
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["compat_worker", "torch._dynamo"])
        started = []

        def starting(*arguments):
            worker = context.Process(target=work, args=arguments, daemon=True)
            started.append(worker)
            worker.start()
            return worker

        yield starting
        for worker in started:
            worker.kill()
            worker.join()
            worker.close()


def finish(workers):
    for worker in workers:
        worker.join(timeout=120)
        assert worker.exitcode == 0


def arrays(folder, model_id):
    made = tracer(folder)
    made.saver.load_current_store(model_id, mode="r")
    store = made.saver.current_store
    return {name: np.array(store[name]) for name in ("grads", "features", "out_to_loss")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The store as one process makes it."""
    torch.set_num_threads(1)  # as the workers do: the same sums, bit for bit
    folder = tmp_path_factory.mktemp("alone") / "store"
    made = tracer(folder)
    for model_id in (0, 1):
        featurize(made, STATES[model_id], model_id)
    made.finalize_features()
    return folder


def assert_same(folder, alone, model_ids):
    for model_id in model_ids:
        found, expected = arrays(folder, model_id), arrays(alone, model_id)
        for name, values in expected.items():
            assert np.array_equal(found[name], values), name


def test_two_processes_with_a_checkpoint_each(start, alone, tmp_path):
    folder = tmp_path / "store"
    finish([start("featurize", folder, number, 2) for number in (0, 1)])
    assert_same(folder, alone, (0, 1))
    made = tracer(folder)
    assert sorted(made.saver.model_ids) == [0, 1]
    for model_id in (0, 1):
        score(made, STATES[model_id], model_id, "mine")
    assert made.finalize_scores("mine").shape == (N, M)
    assert not list(folder.rglob("*.part"))


def test_two_processes_share_a_checkpoint(start, alone, tmp_path):
    folder = tmp_path / "store"
    finish([start("share", folder, number, 2) for number in (0, 1)])
    tracer(folder).finalize_features()
    assert_same(folder, alone, [0])


def test_a_killed_process_goes_on_where_it_was(start, alone, tmp_path):
    folder = tmp_path / "store"
    worker = start("stall", folder, 0, 1)
    deadline = time.monotonic() + 120
    while not (folder / "stalling").exists():
        assert time.monotonic() < deadline
        assert worker.is_alive()
        time.sleep(0.02)
    worker.kill()
    worker.join()
    made = tracer(folder)
    with pytest.raises(ModelIDException, match=r"Found 24 of model id 0 that are not: 16, 17"):
        made.finalize_features()
    computed = []
    compute = made.gradient_computer.compute_per_sample_grad
    made.gradient_computer.compute_per_sample_grad = lambda batch: (
        computed.append(len(batch[0])) or compute(batch)
    )
    featurize(made, STATES[0], 0)
    made.finalize_features()
    assert sum(computed) == N - 16
    assert_same(folder, alone, [0])


def test_a_process_killed_between_its_last_sample_and_the_count(alone, tmp_path):
    made = tracer(tmp_path)
    made.saver.serialize_current_model_id_metadata = lambda already_exists=True: None
    made.saver.register_model_id(0)
    type(made.saver).serialize_current_model_id_metadata(made.saver, already_exists=False)
    featurize(made, STATES[0], 0)
    assert '"is_featurized": 0' in (tmp_path / "id_0.json").read_text()
    tracer(tmp_path).finalize_features()
    assert_same(tmp_path, alone, [0])


def test_a_kill_while_finalizing_leaves_no_finished_features(alone, tmp_path):
    made = tracer(tmp_path)
    featurize(made, STATES[0], 0)
    made.finalize_features()
    again = tracer(tmp_path, lambda_reg=1.0)

    def killed(grads, xtx):
        raise KeyboardInterrupt

    again.score_computer.get_x_xtx_inv = killed
    with pytest.raises(KeyboardInterrupt):
        again.finalize_features()
    assert tracer(tmp_path).saver.model_ids[0]["is_finalized"] == 0
    tracer(tmp_path).finalize_features()
    assert_same(tmp_path, alone, [0])


def test_many_processes_score_from_one_finished_store(start, tmp_path):
    folder = tmp_path / "store"
    made = tracer(folder)
    featurize(made, STATES[0], 0)
    made.finalize_features()
    before = (folder / "0/features.mmap").stat().st_mtime_ns
    finish([start("score", folder, number, 3) for number in range(3)])
    made = tracer(folder)
    assert sorted(made.saver.experiments) == ["exp0", "exp1", "exp2"]
    assert all(found["scores_finalized"] for found in made.saver.experiments.values())
    first, *others = (np.load(folder / f"scores/exp{i}.mmap") for i in range(3))
    assert all(np.array_equal(first, other) for other in others)
    assert (folder / "0/features.mmap").stat().st_mtime_ns == before
    score(made, STATES[0], 0, "exp0")
    assert not made.saver.current_store["features"].flags.writeable
