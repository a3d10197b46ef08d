"""Compare with the package ``traker`` in one process: same model, data and matrix."""

import copy
import warnings

import numpy as np
import pytest
from compat_models import SETTINGS, TASKS, M, N, Net, checkpoints, close, images, injected, walk

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


def their_walk(*arguments, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return walk(*arguments, package=theirs, **settings)


def store(traker, model_id, name):
    traker.saver.load_current_store(model_id)
    return np.array(traker.saver.current_store[name])


# Each pair of values of two settings occurs.
@pytest.mark.parametrize(
    ("task", "lambda_reg", "n_checkpoints", "subset"),
    [
        ("image_classification", 0.0, 1, False),
        ("image_classification", 1e-2, 3, True),
        ("image_classification", 1e-2, 1, False),
        ("text_classification", 0.0, 3, False),
        ("text_classification", 1e-2, 1, True),
        ("text_classification", 0.0, 1, True),
    ],
)
def test_features_weights_and_scores_are_theirs(task, lambda_reg, n_checkpoints, subset, tmp_path):
    make, data = TASKS[task]
    model, states = make(), checkpoints(make, n_checkpoints)
    grad_wrt = SUBSETS[task] if subset else None
    parameters = dict(model.named_parameters())
    p = sum(parameters[name].numel() for name in grad_wrt or parameters)
    given = {"task": task, "lambda_reg": lambda_reg, "grad_wrt": grad_wrt}
    study = states, data(N), data(M, seed=1)
    projector = injected(theirs.projectors.AbstractProjector, p, K)
    own_model = copy.deepcopy(model)
    expected, their_scores = their_walk(
        model, *study, save_dir=tmp_path / "theirs", projector=projector, **given
    )
    # Our projector has the matrix that was injected into theirs.
    traker, scores = walk(own_model, *study, save_dir=tmp_path / "ours", proj_dim=K, **given)
    for model_id in range(n_checkpoints):
        for name in ("grads", "features", "out_to_loss"):
            close(store(traker, model_id, name), store(expected, model_id, name))
    close(scores, their_scores)
    assert traker.num_params == expected.num_params
    assert traker.num_params_for_grad == expected.num_params_for_grad == p
    assert traker.normalize_factor == expected.normalize_factor


def test_without_projection_the_numbers_are_theirs(tmp_path):
    given = {"lambda_reg": 1e-2, "grad_wrt": ["fc.bias", "fc.weight"]}
    study = Net(), checkpoints(Net, 1), images(N), images(M, seed=1)
    results = []
    for name, package, run in (("theirs", theirs, their_walk), ("ours", ours, walk)):
        projector = package.projectors.NoOpProjector(device="cpu")
        traker, scores = run(*study, save_dir=tmp_path / name, projector=projector, **given)
        results.append((traker.saver.current_store["grads"], scores))
    (their_grads, their_scores), (grads, scores) = results
    close(grads, their_grads)
    close(scores, their_scores)


@pytest.mark.parametrize("subset", [False, True], ids=["all", "grad_wrt"])
@pytest.mark.parametrize("task", TASKS)
def test_functional_and_iterative_agree(task, subset):
    make, data = TASKS[task]
    model, batch = make().eval(), data(7)
    model.load_state_dict(checkpoints(make, 1)[0])
    tasks = ours.modelout_functions.TASK_TO_MODELOUT
    given = {"device": "cpu", "grad_wrt": SUBSETS[task] if subset else None}
    functional = FunctionalGradientComputer(model, tasks[task](), **given)
    gradients = functional.compute_per_sample_grad(batch)
    if subset:
        assert sorted(gradients) == sorted(SUBSETS[task])
    flat = ours.utils.vectorize(gradients, device="cpu")
    kinds = [tasks[name] for name in {task, f"iterative_{task}"} & tasks.keys()]
    # A subclass is differentiated by its own `get_output`.
    for kind in (*kinds, *(type("Own", (kind,), {}) for kind in kinds)):
        iterative = IterativeGradientComputer(model, kind(), **given)
        close(iterative.compute_per_sample_grad(batch), flat, 1e-5)
        close(iterative.compute_loss_grad(batch), functional.compute_loss_grad(batch), 1e-5)


def test_half_precision_stores_what_theirs_computes(tmp_path):
    """The original sums in half precision too, so only values before any sum are compared."""
    p = sum(q.numel() for q in Net().parameters())
    (state,), stored = checkpoints(Net, 1), []
    for name, package in (("theirs", theirs), ("ours", ours)):
        projector = injected(package.projectors.AbstractProjector, p, K)
        given = {**SETTINGS, "use_half_precision": True, "save_dir": tmp_path / name}
        traker = package.TRAKer(model=Net(), train_set_size=N, projector=projector, **given)
        traker.load_checkpoint(state, model_id=0)
        traker.featurize(images(N), num_samples=N)
        stored.append([store(traker, 0, key) for key in ("grads", "out_to_loss")])
        assert stored[-1][0].dtype == np.float16
    for their_values, values in zip(*stored, strict=True):
        close(values, their_values, 1e-3)
