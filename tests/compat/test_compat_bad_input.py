"""What a user may get wrong in TRAK's interface, and the one clear error for it."""

import json
import re

import numpy as np
import pytest
import torch
from compat_models import CLASSES, M, N, Net, checkpoints, images

import trak_core.compat as trak
from trak_core.compat.projectors import BasicProjector
from trak_core.compat.savers import MmapSaver, ModelIDException
from trak_core.compat.score_computers import BasicScoreComputer
from trak_core.errors import InputError

TRAIN, TARGETS = images(N), images(M, seed=1)
(STATE, OTHER) = checkpoints(Net, 2)


def tracer(folder, **arguments):
    given = {
        "model": Net(),
        "task": "image_classification",
        "train_set_size": N,
        "save_dir": folder,
        "device": "cpu",
        "proj_dim": 12,
        "logging_level": 100,
        "use_half_precision": False,
    }
    return trak.TRAKer(**{**given, **arguments})


@pytest.fixture
def loaded(tmp_path):
    made = tracer(tmp_path)
    made.load_checkpoint(STATE, 0)
    return made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "images"}, "must be one of image_classification, clip, text_class.*'images'"),
        ({"task": trak.modelout_functions.ImageClassificationModelOutput}, "an instance with"),
        ({"model": "resnet"}, "`model` must be a torch module. Found str"),
        ({"train_set_size": 0}, "`train_set_size` must be an integer, at least 1 .* Found 0"),
        ({"train_set_size": 4.5}, "`train_set_size` must be an integer"),
        ({"proj_dim": None}, "Without a `projector`, `proj_dim` must be given"),
        ({"proj_dim": -3}, "`proj_dim` must be an integer, at least 1"),
        ({"projector": BasicProjector}, "`projector` must be an instance or None"),
        (
            {"projector": BasicProjector(9, 4, 0, "normal", "cpu")},
            r"grad_dim must be the number of parameters .*, 860\. Found 9",
        ),
        ({"saver": object()}, "`saver` must be a class, such as MmapSaver"),
        ({"gradient_computer": object()}, "`gradient_computer` must be a class"),
        ({"score_computer": 3}, "`score_computer` must be a class"),
        ({"lambda_reg": -1.0}, "`lambda_reg` must be a number, at least 0. Found -1"),
        ({"lambda_reg": float("nan")}, "`lambda_reg` must be a number"),
        ({"grad_wrt": ["fc.weights"]}, r"must name parameters of the model.* Found fc\.weights"),
        ({"grad_wrt": []}, "at least one. Found none"),
        ({"projector_seed": -1}, "The projection's seed must be at least 0"),
    ],
)
def test_constructing(arguments, message, tmp_path):
    with pytest.raises(InputError, match=message):
        tracer(tmp_path, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a machine without a GPU")
def test_the_default_device_without_a_gpu(tmp_path):
    with pytest.raises(InputError, match=r"`device` is 'cuda'.* device='cpu'"):
        tracer(tmp_path, device="cuda")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"proj_dim": 13}, "JL dimension 12 there and 13 here"),
        ({"train_set_size": N + 1}, f"train set size {N} there and {N + 1} here"),
        ({"projector_seed": 1}, "matrix .*'seed': 0.* there and .*'seed': 1"),
        ({"grad_wrt": ["fc.bias"]}, "matrix|parameters"),
        (
            {"projector": BasicProjector(860, 12, 0, "normal", "cpu")},
            "JL matrix type 'rademacher' there and 'normal' here",
        ),
    ],
)
def test_a_folder_made_with_other_settings_is_refused(changed, message, tmp_path):
    tracer(tmp_path)
    for load in (True, False):
        with pytest.raises(InputError, match=message):
            tracer(tmp_path, load_from_save_dir=load, **changed)


def test_a_folder_of_the_original_is_refused(tmp_path):
    content = {"JL dimension": 12, "JL matrix type": "rademacher", "train set size": N}
    (tmp_path / "metadata.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="Found matrix None there"):
        tracer(tmp_path)


def test_the_other_precision_is_refused(tmp_path):
    made = tracer(tmp_path)
    made.load_checkpoint(STATE, 0)
    with pytest.raises(InputError, match=r"must be float16 of shape .*Found float32"):
        tracer(tmp_path, use_half_precision=True).load_checkpoint(STATE, 0)


def test_featurizing_without_a_checkpoint(tmp_path):
    with pytest.raises(InputError, match=r"A checkpoint must be loaded first.*`load_checkpoint`"):
        tracer(tmp_path).featurize(TRAIN, num_samples=N)
    with pytest.raises(InputError, match="call `start_scoring_checkpoint`"):
        tracer(tmp_path).score(TARGETS, num_samples=M)


@pytest.mark.parametrize(
    ("checkpoint", "model_id", "message"),
    [
        ({}, 0, r"keys must be those of the model\. Found missing in the checkpoint: conv1"),
        ({**STATE, "head.bias": torch.zeros(3)}, 0, "unknown to the model: head.bias"),
        ({**STATE, "fc.bias": torch.zeros(9)}, 0, r"of another shape: fc\.bias \(9,\) for \(4,\)"),
        ("run1.pt", 0, "`checkpoint` must be a state dict.* Found str"),
        ({"model": STATE}, 0, "`checkpoint` must be a state dict"),
        (STATE, -1, "`model_id` must be an integer, at least 0"),
        (STATE, "run1", "`model_id` must be an integer"),
        (STATE, 2**32, "below 4294967296"),
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
        (TRAIN, {}, "Exactly one of `num_samples` and `inds` must be given. Found neither"),
        (TRAIN, {"inds": range(N), "num_samples": N}, "Found both"),
        (TRAIN, {"num_samples": N - 1}, f"samples in the batch, {N}. Found {N - 1}"),
        (TRAIN, {"num_samples": -2}, "`num_samples` must be an integer"),
        (TRAIN, {"inds": np.arange(N) + 1}, f"positions must be from 0 to {N - 1}. Found {N}"),
        (TRAIN, {"inds": np.arange(N) - 1}, "positions must be .* Found -1"),
        (TRAIN, {"inds": [0] * N}, "`inds` must be all different"),
        (TRAIN, {"inds": [0, 1]}, "one integer for each of the batch's 40 samples. Found 2"),
        (TRAIN, {"inds": np.linspace(0, 1, N)}, "dtype float64"),
        (TRAIN[0], {"num_samples": N}, "must be a tuple or list of tensors.* Found Tensor"),
        (({"x": 1}, 2), {"num_samples": N}, "Found an entry of type dict"),
        ((), {"num_samples": N}, "Found an empty batch"),
        ((TRAIN[0], TRAIN[1][:3]), {"num_samples": N}, r"same number of samples.* \(3,\)"),
        ((TRAIN[0][:0], TRAIN[1][:0]), {"num_samples": 0}, "at least one"),
        ((TRAIN[0].flatten(1), TRAIN[1]), {"num_samples": N}, r"Found tensors \(40, 108\)"),
        ((TRAIN[0],), {"num_samples": N}, "and, last, the label.* Found a tuple of 1"),
        ((TRAIN[0], TRAIN[1].float()), {"num_samples": N}, r"Labels must be integers.*float32"),
        ((TRAIN[0], TRAIN[1] + 3), {"num_samples": N}, "Labels must be integers from 0 to 3"),
        ((TRAIN[0] / 0, TRAIN[1]), {"num_samples": N}, "must be finite.* for the samples 0, 1,"),
    ],
)
def test_batches(batch, where, message, loaded):
    with pytest.raises(InputError, match=re.compile(message, re.S)):
        loaded.featurize(batch, **where)
    assert not loaded.saver.current_store["is_featurized"].any()


def test_more_samples_than_there_are(loaded):
    loaded.featurize(TRAIN, num_samples=N)
    with pytest.raises(InputError, match=rf"There are {N} training samples.* Found {N}, "):
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
        with pytest.raises(InputError, match="`exp_name` must be a text"):
            loaded.start_scoring_checkpoint(name, STATE, 0, M)
    with pytest.raises(InputError, match="`num_targets` must be an integer, at least 1"):
        loaded.start_scoring_checkpoint("mine", STATE, 0, 0)
    loaded.start_scoring_checkpoint("mine", STATE, 0, M)
    with pytest.raises(InputError, match=r"There are 6 targets, .* Found 6"):
        loaded.score([t[:1] for t in TARGETS], inds=[6])
    with pytest.raises(InputError, match="Found 7 targets for 'mine', which has 6"):
        loaded.start_scoring_checkpoint("mine", STATE, 0, M + 1)


def test_a_damaged_or_leftover_store(loaded, tmp_path):
    loaded.featurize(TRAIN, num_samples=N)
    path = tmp_path / "0/grads.mmap"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"grads\.mmap: an array of the store must be a whole"):
        tracer(tmp_path).load_checkpoint(STATE, 0)
    path.unlink()
    (tmp_path / "id_0.json").unlink()
    with pytest.raises(ModelIDException, match=r"must hold no features\. Found some, but no id_0"):
        tracer(tmp_path).load_checkpoint(STATE, 0)


def test_registering_twice(loaded):
    with pytest.raises(ModelIDException, match=r"must be registered once\. Found model id 0"):
        loaded.saver.register_model_id(0)


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
    assert CLASSES == 4
