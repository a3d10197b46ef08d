"""What a user may get wrong in TRAK's interface, and the one clear error for it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compat_models import M, N, Net, checkpoints, images, tracer

import trak_core.compat as trak
from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_core.compat.projectors import BasicProjector
from trak_core.compat.savers import AssertedError, MmapSaver, ModelIDException
from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.errors import InputError

TRAIN, TARGETS = images(N), images(M, seed=1)
(STATE, OTHER) = checkpoints(Net, 2)


@pytest.fixture
def loaded(tmp_path):
    made = tracer(tmp_path)
    made.load_checkpoint(STATE, 0)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "images"}, "image_classification, clip, text_class.*'images'"),
        ({"task": trak.modelout_functions.ImageClassificationModelOutput}, "`task` .*an instance"),
        ({"train_set_size": 0}, "`train_set_size` .*Found 0"),
        ({"train_set_size": 4.5}, r"`train_set_size` .*Found 4\.5"),
        ({"proj_dim": None}, "`proj_dim` .*Found None"),
        ({"proj_dim": -3}, "`proj_dim` .*Found -3"),
        ({"lambda_reg": -1.0}, "`lambda_reg` .*Found -1"),
        ({"lambda_reg": float("nan")}, "`lambda_reg` .*Found nan"),
        ({"grad_wrt": ["fc.weights"]}, r"`grad_wrt` .*Found fc\.weights"),
        ({"grad_wrt": []}, "`grad_wrt` .*Found none"),
        ({"projector_seed": -1}, "seed must be at least 0"),
    ],
)
def test_constructing(arguments, message, tmp_path):
    with pytest.raises(InputError, match=message):
        tracer(tmp_path, **arguments)


def test_a_projector_for_another_number_of_parameters(tmp_path):
    made = tracer(tmp_path, projector=BasicProjector(9, 4, 0, "normal", "cpu"))
    made.load_checkpoint(STATE, 0)
    with pytest.raises(InputError, match=r"grad_dim is 9, .*Found 860"):
        made.featurize(TRAIN, num_samples=N)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")
def test_the_default_device_without_a_gpu(tmp_path):
    with pytest.raises(InputError, match=r"'cuda'.* device='cpu'"):
        tracer(tmp_path, device="cuda")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"proj_dim": 13}, "JL dimension 12 in .* and 13 here"),
        ({"train_set_size": N + 1}, f"train set size {N} in .* and {N + 1} here"),
        ({"projector_seed": 1}, "matrix .*'seed': 0.* and .*'seed': 1"),
        ({"grad_wrt": ["fc.bias"]}, "matrix|parameters"),
        (
            {"projector": BasicProjector(860, 12, 0, "normal", "cpu")},
            "JL matrix type 'rademacher' in .* and 'normal' here",
        ),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(changed, message, tmp_path):
    tracer(tmp_path)
    for load in (True, False):
        with pytest.raises(AssertedError, match=message):
            tracer(tmp_path, load_from_save_dir=load, **changed)


def test_a_folder_of_the_original_is_refused(tmp_path):
    content = {"JL dimension": 12, "JL matrix type": "rademacher", "train set size": N}
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="Found matrix None in"):
        tracer(tmp_path)


def test_the_other_precision_is_refused(tmp_path):
    made = tracer(tmp_path)
    made.load_checkpoint(STATE, 0)
    with pytest.raises(InputError, match=r"float16 .*Found float32"):
        tracer(tmp_path, use_half_precision=True).load_checkpoint(STATE, 0)


def test_what_the_original_asserts_is_an_assertion_error_too(loaded, tmp_path):
    made = tracer(tmp_path / "new")
    for error in (AssertionError, InputError):
        with pytest.raises(error, match=r"`traker\.load_checkpoint` before featurizing"):
            made.featurize(TRAIN, num_samples=N)
        for unready in (made, loaded):
            with pytest.raises(error, match=r"`traker\.start_scoring_checkpoint` before scoring"):
                unready.score(TARGETS, num_samples=M)
        for where, given in (({}, "neither"), ({"inds": range(N), "num_samples": N}, "both")):
            with pytest.raises(error, match=f"Found {given}"):
                loaded.featurize(TRAIN, **where)


@pytest.mark.parametrize(
    ("checkpoint", "model_id", "message"),
    [
        ({}, 0, r"Found missing in the checkpoint: conv1"),
        ({**STATE, "head.bias": torch.zeros(3)}, 0, "unknown to the model: head.bias"),
        ({**STATE, "fc.bias": torch.zeros(9)}, 0, r"of another shape: fc\.bias \(9,\) for \(4,\)"),
        ("run1.pt", 0, r"`torch\.load\('run1\.pt'\)`"),
        (Path("run1.pt"), 0, r"`torch\.load\('run1\.pt'\)`"),
        ({"state_dict": STATE, "epoch": 3}, 0, r"`checkpoint\['state_dict'\]`"),
        ({**STATE, "epoch": 3}, 0, "Found other values under epoch"),
        (Net(), 0, r"Found Net: give its `state_dict\(\)`"),
        (STATE, -1, "`model_id` .*Found -1"),
        (STATE, "run1", "`model_id` .*Found 'run1'"),
        (STATE, 2**32, "`model_id` .*below 4294967296"),
    ],
)
def test_checkpoints(checkpoint, model_id, message, tmp_path):
    with pytest.raises(InputError, match=message):
        tracer(tmp_path).load_checkpoint(checkpoint, model_id)
    assert not list(tmp_path.glob("id_*.json"))


def test_a_model_id_stands_for_one_checkpoint(loaded, tmp_path):
    loaded.load_checkpoint(OTHER, 0)
    loaded.load_checkpoint(STATE, 0)
    loaded.featurize(TRAIN, num_samples=N)
    loaded.finalize_features()
    with pytest.raises(InputError, match="A model id stands for one checkpoint"):
        tracer(tmp_path).load_checkpoint(OTHER, 0)
    with pytest.raises(InputError, match="A model id stands for one checkpoint"):
        loaded.start_scoring_checkpoint("mine", OTHER, 0, M)


@pytest.mark.parametrize(
    ("batch", "where", "message"),
    [
        (TRAIN, {"num_samples": N - 1}, f"`num_samples` .*{N}. Found {N - 1}"),
        (TRAIN, {"num_samples": -2}, "`num_samples` .*Found -2"),
        (TRAIN, {"inds": np.arange(N) + 1}, f"from 0 to {N - 1}. Found {N}"),
        (TRAIN, {"inds": np.arange(N) - 1}, f"from 0 to {N - 1}. Found -1"),
        (TRAIN, {"inds": [0] * N}, "`inds` .*int64: 0, 0"),
        (TRAIN, {"inds": [0, 1]}, "`inds` .*Found 2 values"),
        (TRAIN, {"inds": np.linspace(0, 1, N)}, "`inds` .*dtype float64"),
        (TRAIN[0], {"num_samples": N}, "Found Tensor"),
        (({"x": 1}, 2), {"num_samples": N}, "Found tuple of dict, int"),
        ((), {"num_samples": N}, "Found tuple of nothing"),
        ((TRAIN[0], TRAIN[1][:3]), {"num_samples": N}, r"Found shapes .*\(3,\)"),
        ((TRAIN[0][:0], TRAIN[1][:0]), {"num_samples": 0}, "at least one"),
        ((TRAIN[0].flatten(1), TRAIN[1]), {"num_samples": N}, r"tensors \(40, 108\)"),
        ((TRAIN[0],), {"num_samples": N}, "Found a tuple of 1"),
        ((TRAIN[0], TRAIN[1].float()), {"num_samples": N}, "integers.*float32"),
        ((TRAIN[0], TRAIN[1] + 3), {"num_samples": N}, "integers from 0 to 3"),
        ((TRAIN[0] / 0, TRAIN[1]), {"num_samples": N}, "finite.* for the samples 0, 1,"),
    ],
)
def test_batches(batch, where, message, loaded):
    with pytest.raises(InputError, match=re.compile(message, re.S)):
        loaded.featurize(batch, **where)
    assert not loaded.saver.current_store["is_featurized"].any()


@pytest.mark.parametrize("computer", [FunctionalGradientComputer, IterativeGradientComputer])
def test_labels_are_named_by_their_place(computer, tmp_path):
    made = tracer(tmp_path, gradient_computer=computer)
    made.load_checkpoint(STATE, 0)
    made.featurize(TRAIN, num_samples=N)
    made.finalize_features()
    made.start_scoring_checkpoint("mine", STATE, 0, M)
    for label in (-1, 4):
        with pytest.raises(InputError, match=f"Found {label} in sample 2"):
            made.score((TARGETS[0][:1], torch.tensor([label])), inds=[2])


def test_more_samples_than_there_are(loaded):
    loaded.featurize(TRAIN, num_samples=N)
    with pytest.raises(InputError, match=rf"{N} training samples.* Found {N}, "):
        loaded.featurize(TRAIN, num_samples=N)


def test_gradients_that_are_not_finite_are_named(loaded):
    with torch.no_grad():
        loaded.model.fc.weight[2] = float("inf")
    with pytest.raises(InputError, match=r"NaN or infinity for the samples 3, 4.* in .*fc\.weight"):
        loaded.featurize([t[:2] for t in TRAIN], inds=[3, 4])


def test_float16_that_overflows_or_loses_a_sample(tmp_path):
    made = tracer(tmp_path, use_half_precision=True)
    for size in (1e7, 1e-12):
        made.projector.project = lambda grads, model_id, size=size: torch.full((2, 12), size)
        made.load_checkpoint(STATE, 0)
        with pytest.raises(InputError, match=r"stored as float16.* 7, 8\. Set use_half_precision"):
            made.featurize([t[:2] for t in TRAIN], inds=[7, 8])


def test_finalizing_what_is_not_there(loaded, tmp_path):
    with pytest.raises(ModelIDException, match=r"40 of model id 0 .*: 0, 1, 2.*Call `featurize`"):
        loaded.finalize_features()
    with pytest.raises(ModelIDException, match=r"Found no 5; it has 0\. `load_checkpoint`"):
        loaded.finalize_features(model_ids=[5])
    with pytest.raises(ModelIDException, match="Found none; it has none"):
        tracer(tmp_path / "empty").finalize_features()
    with pytest.raises(ModelIDException, match="Found no model id 9"):
        loaded.start_scoring_checkpoint("mine", STATE, 9, M)


def test_experiments(loaded, tmp_path):
    loaded.featurize(TRAIN, num_samples=N)
    loaded.finalize_features()
    with pytest.raises(InputError, match="Found no 'other'; there are none"):
        loaded.finalize_scores("other")
    for name in ("", "a/b", 3):
        with pytest.raises(InputError, match="`exp_name`"):
            loaded.start_scoring_checkpoint(name, STATE, 0, M)
    with pytest.raises(InputError, match=r"`num_targets` .*Found 0"):
        loaded.start_scoring_checkpoint("mine", STATE, 0, 0)
    loaded.start_scoring_checkpoint("mine", STATE, 0, M)
    with pytest.raises(InputError, match=r"6 targets, .* Found 6"):
        loaded.score([t[:1] for t in TARGETS], inds=[6])
    with pytest.raises(InputError, match="Found 7 targets for 'mine', which has 6"):
        loaded.start_scoring_checkpoint("mine", STATE, 0, M + 1)


def test_a_damaged_or_leftover_store(loaded, tmp_path):
    with pytest.raises(ModelIDException, match="Model id 0 is registered already"):
        loaded.saver.register_model_id(0)
    loaded.featurize(TRAIN, num_samples=N)
    path = tmp_path / "0/grads.mmap"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"grads\.mmap must be a whole"):
        tracer(tmp_path).load_checkpoint(STATE, 0)
    path.unlink()
    (tmp_path / "id_0.json").unlink()
    with pytest.raises(ModelIDException, match=r"Found some in .*, but no id_0"):
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
