"""The numbers of the real ``traker`` package: same model, data and matrix, both in this process."""

import copy
import warnings
from functools import partial

import numpy as np
import pytest
from compat_models import TASKS, M, N, Net, checkpoints, images, injected, walk

import trak_core.compat as ours
from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)

with warnings.catch_warnings():
    # Its docstrings have escapes that Python warns of when it compiles them.
    warnings.simplefilter("ignore")
    theirs = pytest.importorskip("trak", reason="with the extra `test`, as `make test` has it")

K = 12
SUBSETS = {
    "image_classification": ["fc.weight", "fc.bias", "conv2.weight"],
    "text_classification": ["head.weight", "layer.linear1.weight"],
}


def close(found, expected, tolerance=1e-4):
    """Largest difference, in units of the largest entry."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"relative error {error:.1e}")
    assert error <= tolerance


def their_walk(*arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return walk(theirs, *arguments, **settings)


def store(tracer, model_id, name):
    tracer.saver.load_current_store(model_id)
    return np.array(tracer.saver.current_store[name])


@pytest.mark.parametrize("subset", [False, True], ids=["all", "grad_wrt"])
@pytest.mark.parametrize("n_checkpoints", [1, 3])
@pytest.mark.parametrize("lambda_reg", [0.0, 1e-2])
@pytest.mark.parametrize("task", TASKS)
def test_features_weights_and_scores_are_theirs(task, lambda_reg, n_checkpoints, subset, tmp_path):
    make, data = TASKS[task]
    model, states = make(), checkpoints(make, n_checkpoints)
    grad_wrt = SUBSETS[task] if subset else None
    parameters = dict(model.named_parameters())
    p = sum(parameters[name].numel() for name in grad_wrt or parameters)
    given = {"task": task, "lambda_reg": lambda_reg, "grad_wrt": grad_wrt}
    train, targets = data(N), data(M, seed=1)
    projector = injected(theirs.projectors.AbstractProjector, p, K)
    expected, scores = their_walk(
        copy.deepcopy(model),
        states,
        train,
        targets,
        save_dir=tmp_path / "theirs",
        projector=projector,
        **given,
    )
    # Our own projector: its matrix is the one that was injected into theirs.
    found, ours_scores = walk(
        ours, model, states, train, targets, save_dir=tmp_path / "ours", proj_dim=K, **given
    )
    for model_id in range(n_checkpoints):
        for name in ("grads", "features", "out_to_loss"):
            close(store(found, model_id, name), store(expected, model_id, name))
    close(ours_scores, scores)
    assert found.num_params == expected.num_params
    assert found.num_params_for_grad == expected.num_params_for_grad == p
    assert found.normalize_factor == expected.normalize_factor


def test_the_iterative_computer_and_task_give_their_numbers(tmp_path):
    states, train, targets = checkpoints(Net, 2), images(N), images(M, seed=1)
    p = sum(q.numel() for q in Net().parameters())
    task = "iterative_image_classification"
    expected, scores = their_walk(
        Net(),
        states,
        train,
        targets,
        task=theirs.modelout_functions.TASK_TO_MODELOUT[task](),
        save_dir=tmp_path / "theirs",
        projector=injected(theirs.projectors.AbstractProjector, p, K),
        gradient_computer=theirs.gradient_computers.IterativeGradientComputer,
    )
    found, ours_scores = walk(
        ours,
        Net(),
        states,
        train,
        targets,
        task=task,
        save_dir=tmp_path / "ours",
        proj_dim=K,
        gradient_computer=IterativeGradientComputer,
    )
    close(store(found, 1, "grads"), store(expected, 1, "grads"))
    close(store(found, 1, "out_to_loss"), store(expected, 1, "out_to_loss"))
    close(ours_scores, scores)


def test_without_projection_the_numbers_are_theirs(tmp_path):
    given = {"lambda_reg": 1e-2, "grad_wrt": ["fc.bias", "fc.weight"]}
    what = Net(), checkpoints(Net, 1), images(N), images(M, seed=1)
    found = {}
    for name, package, run in (("theirs", theirs, their_walk), ("ours", ours, partial(walk, ours))):
        projector = package.projectors.NoOpProjector(device="cpu")
        found[name] = run(*what, save_dir=tmp_path / name, projector=projector, **given)
    grads = {name: tracer.saver.current_store["grads"] for name, (tracer, _) in found.items()}
    close(grads["ours"], grads["theirs"])
    close(found["ours"][1], found["theirs"][1])


@pytest.mark.parametrize("subset", [False, True], ids=["all", "grad_wrt"])
@pytest.mark.parametrize("task", TASKS)
def test_functional_and_iterative_agree(task, subset):
    make, data = TASKS[task]
    model = make()
    model.load_state_dict(checkpoints(make, 1)[0])
    model.eval()
    output = ours.modelout_functions.TASK_TO_MODELOUT[task]()
    given = {"device": "cpu", "grad_wrt": SUBSETS[task] if subset else None}
    batch = data(7)
    functional = FunctionalGradientComputer(model, output, **given)
    iterative = IterativeGradientComputer(model, output, **given)
    as_dict = functional.compute_per_sample_grad(batch)
    if subset:
        assert sorted(as_dict) == sorted(SUBSETS[task])
    flat = ours.utils.vectorize(as_dict, device="cpu")
    close(iterative.compute_per_sample_grad(batch), flat, 1e-5)
    close(iterative.compute_loss_grad(batch), functional.compute_loss_grad(batch), 1e-5)


def test_the_iterative_task_agrees_with_the_functional_one():
    model = Net()
    model.load_state_dict(checkpoints(Net, 1)[0])
    model.eval()
    tasks, batch = ours.modelout_functions.TASK_TO_MODELOUT, images(5)
    one = FunctionalGradientComputer(model, tasks["image_classification"](), device="cpu")
    other = IterativeGradientComputer(
        model, tasks["iterative_image_classification"](), device="cpu"
    )
    flat = ours.utils.vectorize(one.compute_per_sample_grad(batch), device="cpu")
    close(other.compute_per_sample_grad(batch), flat, 1e-5)


def test_half_precision_stores_what_theirs_computes(tmp_path):
    """theirs sums in half precision too: only what is stored before any sum can be compared."""
    stored = {}
    for name, package in (("theirs", theirs), ("ours", ours)):
        p = sum(q.numel() for q in Net().parameters())
        model, (state,), train = Net(), checkpoints(Net, 1), images(N)
        tracer = package.TRAKer(
            model=model,
            task="image_classification",
            train_set_size=N,
            save_dir=tmp_path / name,
            device="cpu",
            logging_level=100,
            projector=injected(package.projectors.AbstractProjector, p, K),
        )
        tracer.load_checkpoint(state, model_id=0)
        tracer.featurize(train, num_samples=N)
        stored[name] = {key: store(tracer, 0, key) for key in ("grads", "out_to_loss")}
        assert stored[name]["grads"].dtype == np.float16
    for key in ("grads", "out_to_loss"):
        close(stored["ours"][key], stored["theirs"][key], 1e-3)
