"""Errors of TRAK's interface for wrong arguments, batches, checkpoints and folders."""

import re

import numpy as np
import pytest
import torch
from compat_models import M, N, Net, checkpoints, featurize, finalized, images, scored, tracer
from refused import refused

from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_core.compat.projectors import BasicProjector
from trak_core.compat.savers import AssertedError, ModelIDException
from trak_core.errors import InputError

TRAIN, TARGETS = images(N), images(M, seed=1)
PAIR = [t[:2] for t in TRAIN]
STATE, OTHER = checkpoints(Net, 2)


@pytest.fixture
def loaded(tmp_path):
    traker = tracer(tmp_path)
    traker.load_checkpoint(STATE, 0)
    return traker


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ({"proj_dim": -3}, "spec.range", re.compile(r"proj_dim|-3")),
        ({"lambda_reg": -1.0}, "compat.lambda_reg", -1.0),
        ({"grad_wrt": ["fc.weights"]}, "gradients.unmatched_pattern", "'fc.weights'"),
    ],
)
def test_constructing(arguments, code, value, tmp_path):
    with refused(code, value):
        tracer(tmp_path, **arguments)


def test_a_projector_for_another_number_of_parameters(tmp_path):
    projector = BasicProjector(9, 4, 0, "normal", "cpu")
    with refused("compat.grad_dim", 9, 860):
        tracer(tmp_path, projector=projector)
    with refused("compat.grad_dim", 9, 8):
        projector.project(torch.ones(2, 8), model_id=0)


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ({"proj_dim": 13}, ["JL dimension", 12, 13]),
        ({"projector_seed": 1}, ["matrix", "'seed': 0", "'seed': 1"]),
        ({"grad_wrt": ["fc.bias"]}, ["matrix", "'n_params': 860", "'n_params': 4"]),
        ({"use_half_precision": True}, ["dtype", "'torch.float32'", "'torch.float16'"]),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(changed, values, tmp_path):
    tracer(tmp_path)
    for load in (True, False):
        with refused("compat.other_settings", *values) as caught:
            tracer(tmp_path, load_from_save_dir=load, **changed)
        assert isinstance(caught.value, AssertedError)


def test_what_the_original_asserts_is_an_assertion_error_too(loaded, tmp_path):
    unloaded = tracer(tmp_path / "new")
    both = {"inds": range(N), "num_samples": N}
    for code, call in {
        "no_checkpoint": lambda: unloaded.featurize(TRAIN, num_samples=N),
        "no_scoring": lambda: loaded.score(TARGETS, num_samples=M),
        "inds_or_num_samples": lambda: loaded.featurize(TRAIN, **both),
    }.items():
        with refused(f"compat.{code}") as caught:
            call()
        assert isinstance(caught.value, AssertedError)


def test_a_model_id_stands_for_one_checkpoint(loaded, tmp_path):
    loaded.load_checkpoint(OTHER, 0)
    featurize(loaded)
    loaded.finalize_features()
    with refused("compat.other_weights", "as 0 in"):
        tracer(tmp_path).load_checkpoint(OTHER, 0)
    with refused("compat.other_weights", "as 0 in"):
        loaded.start_scoring_checkpoint("mine", OTHER, 0, M)


ALL = {"num_samples": N}


@pytest.mark.parametrize(
    ("batch", "where", "code", "value"),
    [
        (TRAIN, {"num_samples": N - 1}, "compat.positions", re.compile(r"39: .*7 and 31 more")),
        (TRAIN, {"num_samples": -2}, "compat.positions", "40"),
        (TRAIN, {"inds": np.arange(N) + 1}, "compat.positions", re.compile(r"40: 1, .*")),
        (TRAIN, {"inds": np.arange(N) - 1}, "compat.positions", re.compile(r"40: -1, .*")),
        (TRAIN, {"inds": [0] * N}, "compat.positions", re.compile(r"40: 0, 0.*")),
        (TRAIN, {}, "compat.inds_or_num_samples", "neither"),
        (TRAIN[:1], ALL, "gradients.sample_form", "a tuple of 1"),
        ((TRAIN[0] / 0, TRAIN[1]), ALL, "gradients.not_finite", "samples 0, 1"),
    ],
)
def test_batches_and_positions_that_do_not_fit(batch, where, code, value, loaded):
    with refused(code, value):
        loaded.featurize(batch, **where)
    assert not loaded.saver.current_store["is_featurized"].any()


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_wrong_labels_and_gradients_are_reported_with_their_positions(computer, tmp_path):
    traker = finalized(tmp_path, gradient_computer=computer)
    traker.start_scoring_checkpoint("mine", STATE, 0, M)
    for label in (-1, 4):
        with pytest.raises(InputError, match=f"{label} in sample 2"):
            traker.score((TARGETS[0][:1], torch.tensor([label])), inds=[2])
    with torch.no_grad():
        traker.model.fc.weight[2] = float("inf")
    with pytest.raises(InputError, match=r"samples 3, 4.* in .*fc\.weight"):
        traker.score([t[:2] for t in TARGETS], inds=[3, 4])


@pytest.mark.parametrize(
    ("size", "code", "value"),
    [(1e7, "not_stored", "7, 8"), (np.nan, "not_stored", "7, 8"), (1e-12, "all_zero", "float16")],
)
def test_what_float16_cannot_hold_is_named(size, code, value, tmp_path):
    traker = tracer(tmp_path, use_half_precision=True)
    traker.projector.project = lambda grads, model_id: torch.full((2, 12), size)
    traker.load_checkpoint(STATE, 0)
    with refused(f"compat.{code}", value):
        traker.featurize(PAIR, inds=[7, 8])


def test_finalizing_what_is_not_there(loaded, tmp_path):
    with refused("compat.not_featurized", N, "0, 1, 2, 3, 4, 5, 6, 7"):
        loaded.finalize_features()
    with refused("compat.model_ids", "no 5", 0):
        loaded.finalize_features(model_ids=[5])
    with refused("compat.model_ids", "Found none among the stored ids (none)"):
        tracer(tmp_path / "empty").finalize_features()
    with refused("compat.model_ids", "no 9", 0) as caught:
        loaded.start_scoring_checkpoint("mine", STATE, 9, M)
    assert isinstance(caught.value, ModelIDException)


def test_experiments(tmp_path):
    loaded = finalized(tmp_path)
    with pytest.raises(KeyError, match="other"):
        loaded.finalize_scores("other")
    scored(loaded)
    with refused("compat.positions", "1: 6"):
        loaded.score([t[:1] for t in TARGETS], inds=[M])
    with refused("compat.other_targets", 7, "'mine'", M):
        loaded.start_scoring_checkpoint("mine", STATE, 0, M + 1)


def test_a_leftover_store(loaded, tmp_path):
    with refused("compat.registered", 0):
        loaded.saver.register_model_id(0)
    featurize(loaded)
    (tmp_path / "id_0.json").unlink()
    with refused("compat.leftover", "id_0.json"):
        tracer(tmp_path).load_checkpoint(STATE, 0)
