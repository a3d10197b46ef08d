"""Several processes share one save_dir, and a killed process is restarted."""

import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
from compat_models import M, N, featurize, finalized, scored, tracer
from compat_worker import BATCH, work
from patience import longer
from refused import refused
from workspace import REPOSITORY


@pytest.fixture(scope="module")
def start():
    """Return a function that starts a worker, forked from a process with all imports done."""
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
        worker.join(timeout=longer(120))
        assert worker.exitcode == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    torch.set_num_threads(1)  # as in the workers, so that sums are equal bit for bit
    traker = tracer(tmp_path_factory.mktemp("alone"))
    for model_id in (0, 1):
        featurize(traker, model_id, BATCH)
    traker.finalize_features()
    return traker.save_dir


def assert_same(folder, alone, model_ids):
    for model_id in model_ids:
        for name in ("grads", "features", "out_to_loss"):
            values, expected = (np.load(f / f"{model_id}/{name}.mmap") for f in (folder, alone))
            assert np.array_equal(values, expected), name


@pytest.mark.parametrize(("task", "model_ids"), [("featurize", (0, 1)), ("share", (0,))])
def test_two_processes_with_a_checkpoint_each_or_one_together(
    start, alone, tmp_path, task, model_ids
):
    folder = tmp_path / "store"
    finish([start(task, folder, number, 2) for number in (0, 1)])
    traker = tracer(folder)
    traker.finalize_features()
    assert_same(folder, alone, model_ids)
    assert tuple(sorted(traker.saver.model_ids)) == model_ids
    assert scored(traker, model_ids).finalize_scores("mine").shape == (N, M)
    assert not list(folder.rglob("*.part"))


def test_a_killed_process_is_continued_by_another(start, alone, tmp_path):
    folder = tmp_path / "store"
    worker = start("stall", folder, 0, 1)
    deadline = time.monotonic() + longer(120)
    while not (folder / "stalling").exists():
        assert time.monotonic() < deadline
        assert worker.is_alive()
        time.sleep(0.02)
    worker.kill()
    worker.join()
    traker = tracer(folder)
    with refused("compat.not_featurized", 24, "model id 0", "16, 17, 18, 19, 20, 21, 22, 23", 16):
        traker.finalize_features()
    featurize(traker, 0, BATCH)
    traker.finalize_features()
    assert_same(folder, alone, [0])


def test_a_kill_while_finalizing_leaves_no_finished_features(alone, tmp_path):
    traker = tracer(tmp_path)
    featurize(traker, 0, BATCH)
    traker.finalize_features()
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
    finalized(folder)
    before = (folder / "0/features.mmap").stat().st_mtime_ns
    finish([start("score", folder, number, 3) for number in range(3)])
    traker = tracer(folder)
    assert sorted(traker.saver.experiments) == ["exp0", "exp1", "exp2"]
    assert all(state["scores_finalized"] for state in traker.saver.experiments.values())
    first, *others = (np.load(folder / f"scores/exp{i}.mmap") for i in range(3))
    assert all(np.array_equal(first, other) for other in others)
    assert (folder / "0/features.mmap").stat().st_mtime_ns == before
    scored(traker, name="exp0")
    assert not traker.saver.current_store["features"].flags.writeable
