"""What a user may get wrong in TRAK's interface, and the one clear error for it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compat_models import M, N, Net, checkpoints, featurize, finalized, images, scored, tracer
from refused import refused

from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_core.compat.modelout_functions import ImageClassificationModelOutput
from trak_core.compat.projectors import BasicProjector
from trak_core.compat.savers import AssertedError, MmapSaver, ModelIDException
from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.errors import InputError

TRAIN, TARGETS = images(N), images(M, seed=1)
PAIR = [t[:2] for t in TRAIN]
STATE, OTHER = checkpoints(Net, 2)
CAUSE = re.compile(r"RuntimeError: .*")
WITHOUT_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs on a machine without a GPU"
)


@pytest.fixture
def loaded(tmp_path):
    traker = tracer(tmp_path)
    traker.load_checkpoint(STATE, 0)
    return traker


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ({"task": "images"}, "compat.task", "'images'"),
        ({"task": ImageClassificationModelOutput}, "compat.task", "class"),
        ({"train_set_size": 0}, "compat.integer", 0),
        ({"train_set_size": 4.5}, "compat.integer", 4.5),
        ({"proj_dim": None}, "compat.integer", None),
        ({"proj_dim": -3}, "compat.integer", -3),
        ({"lambda_reg": -1.0}, "compat.lambda_reg", -1.0),
        ({"lambda_reg": float("nan")}, "compat.lambda_reg", "nan"),
        ({"grad_wrt": ["fc.weights"]}, "compat.grad_wrt", "fc.weights"),
        ({"grad_wrt": []}, "compat.grad_wrt", "none"),
        ({"projector_seed": -1}, "spec.range", re.compile(r"seed|-1")),
        pytest.param(*({"device": "cuda"}, "compat.device", "'cuda'"), marks=WITHOUT_GPU),
    ],
)
def test_constructing(arguments, code, value, tmp_path):
    with refused(code, value):
        tracer(tmp_path, **arguments)


def test_a_projector_for_another_number_of_parameters(tmp_path):
    traker = tracer(tmp_path, projector=BasicProjector(9, 4, 0, "normal", "cpu"))
    with refused("compat.grad_dim", 9, 860):
        featurize(traker)


@pytest.mark.parametrize(
    ("changed", "values"),
    [
        ({"proj_dim": 13}, ["JL dimension", 12, 13]),
        ({"train_set_size": N + 1}, ["train set size", N, N + 1]),
        ({"projector_seed": 1}, ["matrix", "'seed': 0", "'seed': 1"]),
        ({"grad_wrt": ["fc.bias"]}, ["matrix", "'n_params': 860", "'n_params': 4"]),
        (
            {"projector": BasicProjector(860, 12, 0, "normal", "cpu")},
            ["JL matrix type", "'rademacher'", "'normal'"],
        ),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(changed, values, tmp_path):
    tracer(tmp_path)
    for load in (True, False):
        with refused("compat.other_settings", *values) as caught:
            tracer(tmp_path, load_from_save_dir=load, **changed)
        assert isinstance(caught.value, AssertedError)


def test_a_folder_of_the_original_is_refused(tmp_path):
    content = {"JL dimension": 12, "JL matrix type": "rademacher", "train set size": N}
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    with refused("compat.other_settings", "matrix", None):
        tracer(tmp_path)


def test_the_other_precision_is_refused(loaded, tmp_path):
    with refused("compat.other_map", "float16", "float32", "(40, 12)"):
        tracer(tmp_path, use_half_precision=True).load_checkpoint(STATE, 0)


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


@pytest.mark.parametrize(
    ("checkpoint", "model_id", "code", "value"),
    [
        ("run1.pt", 0, "state_dict", "torch.load('run1.pt')"),
        (Path("run1.pt"), 0, "state_dict", "torch.load('run1.pt')"),
        ({"state_dict": STATE, "epoch": 3}, 0, "state_dict", "checkpoint['state_dict']"),
        ({**STATE, "epoch": 3}, 0, "state_dict", "epoch"),
        (Net(), 0, "state_dict", "Net"),
        (STATE, -1, "integer", -1),
        (STATE, "run1", "integer", "'run1'"),
        (STATE, 2**32, "integer", 4294967296),
    ],
)
def test_checkpoints(checkpoint, model_id, code, value, tmp_path):
    with refused(f"compat.{code}", value):
        tracer(tmp_path).load_checkpoint(checkpoint, model_id)
    assert not list(tmp_path.glob("id_*.json"))


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ({}, r"missing.* conv1"),
        ({**STATE, "head.bias": torch.zeros(3)}, r"unknown.* head\.bias"),
        ({**STATE, "fc.bias": torch.zeros(9)}, r"shape.* fc\.bias \(9,\) for \(4,\)"),
    ],
)
def test_checkpoints_that_do_not_fit_the_model(checkpoint, message, tmp_path):
    with pytest.raises(InputError, match=message):
        tracer(tmp_path).load_checkpoint(checkpoint, 0)
    assert not list(tmp_path.glob("id_*.json"))


def test_a_model_id_stands_for_one_checkpoint(loaded, tmp_path):
    loaded.load_checkpoint(OTHER, 0)
    featurize(loaded)
    loaded.finalize_features()
    with refused("compat.other_weights", "model id 0"):
        tracer(tmp_path).load_checkpoint(OTHER, 0)
    with refused("compat.other_weights", "model id 0"):
        loaded.start_scoring_checkpoint("mine", OTHER, 0, M)


@pytest.mark.parametrize(
    ("batch", "where", "code", "value"),
    [
        (TRAIN, {"num_samples": N - 1}, "num_samples", N - 1),
        (TRAIN, {"num_samples": -2}, "integer", -2),
        (TRAIN, {"inds": np.arange(N) + 1}, "position", N),
        (TRAIN, {"inds": np.arange(N) - 1}, "position", -1),
        (TRAIN, {"inds": [0] * N}, "inds", "int64: 0, 0"),
        (TRAIN, {"inds": [0, 1]}, "inds", "2 values"),
        (TRAIN, {"inds": np.linspace(0, 1, N)}, "inds", re.compile(r"float64: .*(?= and)")),
        (TRAIN, {}, "inds_or_num_samples", "neither"),
        (TRAIN[0], {"num_samples": N}, "batch", "Tensor"),
        (({"x": 1}, 2), {"num_samples": N}, "batch", "dict, int"),
        ((), {"num_samples": N}, "batch", "nothing"),
        ((TRAIN[0], TRAIN[1][:3]), {"num_samples": N}, "batch_rows", "(3,)"),
        ([t[:0] for t in TRAIN], {"num_samples": 0}, "batch_rows", "(0,)"),
        ((TRAIN[0].flatten(1), TRAIN[1]), {"num_samples": N}, "model_call", CAUSE),
    ],
)
def test_batches(batch, where, code, value, loaded):
    with refused(f"compat.{code}", value):
        loaded.featurize(batch, **where)
    assert not loaded.saver.current_store["is_featurized"].any()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((TRAIN[0],), "a tuple of 1"),
        ((TRAIN[0], TRAIN[1].float()), "integers.*float32"),
        ((TRAIN[0], TRAIN[1] + 3), "integers from 0 to 3"),
        ((TRAIN[0] / 0, TRAIN[1]), "samples 0, 1,"),
    ],
)
def test_batches_that_do_not_fit_the_model(batch, message, loaded):
    with pytest.raises(InputError, match=re.compile(message, re.S)):
        loaded.featurize(batch, num_samples=N)
    assert not loaded.saver.current_store["is_featurized"].any()


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_labels_are_named_by_their_place(computer, tmp_path):
    traker = finalized(tmp_path, gradient_computer=computer)
    traker.start_scoring_checkpoint("mine", STATE, 0, M)
    for label in (-1, 4):
        with pytest.raises(InputError, match=f"{label} in sample 2"):
            traker.score((TARGETS[0][:1], torch.tensor([label])), inds=[2])


def test_more_samples_than_there_are(loaded):
    featurize(loaded)
    with refused("compat.position", N, "41, 42, 43, 44, 45, 46, 47 and 32 more"):
        loaded.featurize(TRAIN, num_samples=N)


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_gradients_that_are_not_finite_are_named(computer, tmp_path):
    traker = tracer(tmp_path, gradient_computer=computer)
    traker.load_checkpoint(STATE, 0)
    with torch.no_grad():
        traker.model.fc.weight[2] = float("inf")
    with pytest.raises(InputError, match=r"samples 3, 4.* in .*fc\.weight"):
        traker.featurize(PAIR, inds=[3, 4])


@pytest.mark.parametrize(
    ("size", "code"), [(1e7, "float16"), (1e-12, "float16"), (np.nan, "not_finite")]
)
def test_what_float16_cannot_hold_is_named(size, code, tmp_path):
    traker = tracer(tmp_path, use_half_precision=True)
    traker.projector.project = lambda grads, model_id: torch.full((2, 12), size)
    traker.load_checkpoint(STATE, 0)
    with refused(f"compat.{code}", "samples 7, 8"):
        traker.featurize(PAIR, inds=[7, 8])


def test_finalizing_what_is_not_there(loaded, tmp_path):
    with refused("compat.not_featurized", N, "0, 1, 2, 3, 4, 5, 6, 7"):
        loaded.finalize_features()
    with refused("compat.model_ids", "no 5", 0):
        loaded.finalize_features(model_ids=[5])
    with refused("compat.model_ids", "Found none", "has none"):
        tracer(tmp_path / "empty").finalize_features()
    with refused("compat.unknown_model_id", "no model id 9") as caught:
        loaded.start_scoring_checkpoint("mine", STATE, 9, M)
    assert isinstance(caught.value, ModelIDException)


def test_experiments(tmp_path):
    loaded = finalized(tmp_path)
    with refused("compat.unknown_experiment", "'other'", "none"):
        loaded.finalize_scores("other")
    for name in ("", "a/b", 3):
        with refused("compat.exp_name", repr(name)):
            loaded.start_scoring_checkpoint(name, STATE, 0, M)
    with refused("compat.integer", "num_targets", 0):
        loaded.start_scoring_checkpoint("mine", STATE, 0, 0)
    scored(loaded)
    with refused("compat.position", "targets", M):
        loaded.score([t[:1] for t in TARGETS], inds=[M])
    with refused("compat.other_targets", 7, "'mine'", M):
        loaded.start_scoring_checkpoint("mine", STATE, 0, M + 1)


def test_a_damaged_or_leftover_store(loaded, tmp_path):
    with refused("compat.registered", 0):
        loaded.saver.register_model_id(0)
    featurize(loaded)
    path = tmp_path / "0/grads.mmap"
    path.write_bytes(path.read_bytes()[:100])
    with refused("compat.damaged_map", "grads.mmap", re.compile(r"(?<=file: ).*(?=. Delete)")):
        tracer(tmp_path).load_checkpoint(STATE, 0)
    path.unlink()
    (tmp_path / "id_0.json").unlink()
    with refused("compat.leftover", "id_0.json"):
        tracer(tmp_path).load_checkpoint(STATE, 0)


def test_what_users_read(loaded, tmp_path):
    assert loaded.save_dir == tmp_path.resolve()
    assert loaded.num_params == loaded.num_params_for_grad == 860
    assert loaded.normalize_factor == torch.tensor(860.0).sqrt()
    assert (loaded.proj_dim, loaded.dtype, loaded.device) == (12, torch.float32, "cpu")
    assert isinstance(loaded.saver, MmapSaver)
    assert isinstance(loaded.score_computer, BasicScoreComputer)
    shapes = {"grads": (N, 12), "features": (N, 12), "out_to_loss": (N, 1), "is_featurized": (N, 1)}
    for name, shape in shapes.items():
        assert loaded.saver.current_store[name].shape == shape
    assert loaded.saver.experiments == {}
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    expected = {"JL dimension": 12, "JL matrix type": "rademacher", "train set size": N}
    assert expected.items() <= metadata.items()
    names = {"metadata.json", "experiments.json", "id_0.json", "0", "scores"}
    assert names <= {path.name for path in tmp_path.iterdir()}
