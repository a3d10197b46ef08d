"""The stages, end to end in one process, against an independent float64 implementation."""

import hashlib
from functools import cache

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from pipeline import read_scores, run_stages
from torch import nn
from trained_cases import N_TARGETS, Case, assert_close

from trak_core.artifacts import CHECKPOINT_SCORES, SCORES, open_artifact
from trak_core.errors import InputError
from trak_core.model.features import projecting_device
from trak_core.model.predictions import warn_of_saturation
from trak_core.projection.cuda import machine
from trak_core.stages import compute_features as features


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.set_num_threads(1)
    return {name: Case(name, folder) for name in ("small_digits", "diabetes")}


@pytest.fixture(params=["small_digits", "diabetes"])
def case(request, cases):
    return cases[request.param]


@pytest.fixture(scope="module")
def made(cases, tmp_path_factory):
    """A run of each study and proj_dim, for its features: settings of scoring leave them be."""

    @cache
    def run(name, proj_dim):
        folder = tmp_path_factory.mktemp("made")
        cases[name].stages(folder, proj_dim=proj_dim)
        return folder

    return run


@pytest.mark.parametrize(
    ("n_checkpoints", "combine", "damping", "proj_dim", "weighting", "power", "normalize"),
    [
        (1, "product_of_averages", 2, 300, "plain", 0.5, False),
        (3, "product_of_averages", 2, 300, "plain", 0.5, False),
        (3, "product_of_averages", 2, 300, "plain", 0.5, True),
        (3, "product_of_averages", 0, 16, "plain", 1, False),
        (3, "product_of_averages", 2, 300, "curvature", 0.5, False),
        (3, "average_of_products", 2, 300, "curvature", 1, False),
        (3, "average_of_products", 0, 16, "plain", 0.5, False),
        (3, "unit_average", 2, 300, "curvature", 0.75, False),
        (3, "unit_average", 2, 300, "curvature", 0.75, True),
        (3, "unit_average", 0, 16, "plain", 1, False),
    ],
)
def test_scores_equal_the_formula_in_float64(
    case, made, tmp_path, n_checkpoints, combine, damping, proj_dim, weighting, power, normalize
):
    settings = {
        "damping": damping,
        "proj_dim": proj_dim,
        "weighting": weighting,
        "power": power,
        "combine": combine,
        "normalize": normalize,
    }
    features = made(case.path.stem, proj_dim)
    found = read_scores(case.stages(tmp_path, n_checkpoints, made=features, **settings))
    assert found.index.tolist() == case.train.ids
    assert found.columns.tolist() == case.targets
    assert_close(found.to_numpy(), case.expected(n_checkpoints, **settings), 1e-4)


@pytest.mark.parametrize(
    ("settings", "unit"),
    [
        ({"weighting": "curvature"}, "that of the model output"),
        ({"weighting": "curvature", "normalize": True}, "relative"),
        ({"weighting": "curvature", "combine": "unit_average"}, "relative"),
        ({}, "relative"),
    ],
)
def test_scores_say_their_unit(cases, made, tmp_path, settings, unit):
    features = made("diabetes", 16)
    path = cases["diabetes"].stages(tmp_path, 1, proj_dim=16, power=1, made=features, **settings)
    with open_artifact(path, SCORES) as file:
        assert file.attribute("unit").startswith(unit)


@pytest.mark.parametrize(
    "other", [{"shards": 3}, {"batch_size": 1}, {"batch_size": 41}, {"memory_mb": 1}]
)
def test_shards_batches_and_memory_do_not_change_scores(case, tmp_path, other):
    first = read_scores(case.stages(tmp_path / "first", 1, proj_dim=150)).to_numpy()
    second = read_scores(case.stages(tmp_path / "second", 1, proj_dim=150, **other)).to_numpy()
    assert_close(second, first, 1e-5)


def test_a_second_run_writes_the_same_bytes(case, tmp_path):
    case.stages(tmp_path / "first", proj_dim=33)
    case.stages(tmp_path / "second", proj_dim=33)
    files = sorted(p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*.h5"))
    assert len(files) == 13
    for file in files:
        pair = [(tmp_path / run / file).read_bytes() for run in ("first", "second")]
        assert hashlib.sha256(pair[0]).digest() == hashlib.sha256(pair[1]).digest(), file


def test_top_influences_are_the_extremes_of_the_scores(case, tmp_path):
    path = case.stages(tmp_path, proj_dim=64, top=5)
    scores, table = read_scores(path), pd.read_hdf(path, "top_influences")
    for target in case.targets:
        for sign in (1, -1):
            mine = table[(table["target_id"] == target) & (table["sign"] == sign)]
            best = (sign * scores[target]).sort_values(ascending=False, kind="stable").head(5)
            assert mine["train_id"].tolist() == best.index.tolist()
            np.testing.assert_array_equal(mine["score"], sign * best)
            assert mine["rank"].tolist() == [1, 2, 3, 4, 5]
    query = f"target_id == {case.targets[0]!r} & score > 0 & rank <= 3"
    assert len(pd.read_hdf(path, "top_influences", where=query)) == 3
    with pytest.raises(ValueError, match="sign"):
        pd.read_hdf(path, "top_influences", where=f"target_id == {case.targets[0]!r} & sign == 1")


@pytest.mark.parametrize("normalize", [False, True])
def test_top_k_keeps_the_same_influences_without_the_matrix(case, tmp_path, normalize):
    settings = {"proj_dim": 150, "top": 4, "normalize": normalize}
    full = case.stages(tmp_path / "full", **settings)
    top_k = case.stages(tmp_path / "top_k", keep="top_k", memory_mb=1, **settings)
    expected, found = (pd.read_hdf(p, "top_influences") for p in (full, top_k))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5)
    with pytest.raises(KeyError):
        pd.read_hdf(top_k, "scores")


UNIT = {"combine": "unit_average", "weighting": "curvature", "power": 0.75, "proj_dim": 64}


def test_without_the_matrix_checkpoints_are_divided_by_the_same_norms(cases, tmp_path):
    case = cases["small_digits"]
    full = case.stages(tmp_path / "full", **UNIT)
    top_k = case.stages(tmp_path / "top_k", keep="top_k", **UNIT)
    expected, found = (pd.read_hdf(p, "top_influences") for p in (full, top_k))
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5)


def test_targets_asked_one_by_one_get_the_same_scores(cases, tmp_path):
    """What a checkpoint is divided by comes from the training samples alone."""
    case = cases["small_digits"]
    together = read_scores(case.stages(tmp_path / "together", **UNIT))
    for target in case.targets[:2]:
        alone = run_stages(
            tmp_path / str(target),
            case.path,
            case.checkpoints,
            [target],
            model_output=case.output,
            **UNIT,
        )
        assert_close(read_scores(alone)[target], together[target], 1e-5)


def test_a_budget_that_is_too_small_is_refused(cases, tmp_path):
    expected = r"compute\.memory_mb must hold the normal matrix of proj_dim 300: 3 MiB\. Found 1\. "
    with pytest.raises(InputError, match=expected):
        cases["small_digits"].stages(tmp_path, 1, memory_mb=1, proj_dim=300)


def test_labels_predictions_and_margins_come_along(case, tmp_path):
    path = case.stages(tmp_path, proj_dim=16)
    for key, split in (("train", case.train), ("targets", case.target_split)):
        table = pd.read_hdf(path, key)
        assert table["id"].tolist() == split.ids
        samples = [split.samples[i] for i in range(len(split.ids))]
        np.testing.assert_array_equal(table["label"], [s[-1].item() for s in samples])
        _, f, _ = zip(
            *(oracle.jacobian(m.double().eval(), samples, case.output) for m in doubles(case)),
            strict=True,
        )
        np.testing.assert_allclose(table["output"], np.mean(f, axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(table["output_sd"], np.std(f, axis=0), rtol=1e-3, atol=1e-4)


def test_the_mean_loss_weight_and_what_made_the_files_come_along(case, tmp_path):
    path = case.stages(tmp_path, proj_dim=16, memory_mb=1)
    weights = []
    for file in sorted((tmp_path / "scores/mine").iterdir()):
        with open_artifact(file, CHECKPOINT_SCORES) as part:
            weights.append(part.vector("loss_weights"))
    assert len(weights) == len(case.models)
    found = pd.read_hdf(path, "train")["loss_weight"]
    np.testing.assert_allclose(found, np.mean(weights, axis=0), rtol=1e-6)
    with open_artifact(path, SCORES) as file:
        (of_scores,) = file.provenance["made_from"]
    (of_features,) = of_scores["made_from"]
    assert of_features["torch"] == torch.__version__


def doubles(case):
    import copy

    return [copy.deepcopy(model) for model in case.models.values()]


def test_a_singular_matrix_is_explained(cases, tmp_path):
    with pytest.raises(InputError, match=r"condition number .* Raise `scoring.damping`"):
        cases["small_digits"].stages(tmp_path, 1, proj_dim=200, damping=0)
    assert not (tmp_path / "scores").exists()


def test_float16_features(cases, tmp_path):
    case = cases["small_digits"]
    found = read_scores(case.stages(tmp_path, 1, proj_dim=100, dtype="float16"))
    assert_close(found.to_numpy(), case.expected(1, proj_dim=100, damping=2), 5e-3)


def test_float16_that_cannot_hold_the_features_is_an_error(cases, tmp_path):
    case = cases["small_digits"]
    state = {
        k: v * (1e5 if k == "8.weight" else 1) for k, v in case.models["c0"].state_dict().items()
    }
    torch.save(state, tmp_path / "large.pt")
    with pytest.raises(InputError, match="features_dtype"):
        run_stages(
            tmp_path / "results",
            case.path,
            {"large": tmp_path / "large.pt"},
            case.targets,
            model_output=case.output,
            proj_dim=64,
            dtype="float16",
        )
    assert not list((tmp_path / "results").rglob("*.h5"))


def test_float16_keeps_what_it_can_and_says_what_it_cannot():
    """A few entries that vanish cost nothing; a sample whose entries all do is lost."""
    good = np.full((2, 1000), 1e-2, dtype=np.float32)
    good[:, ::10] = 1e-9
    good[1] = 0
    np.testing.assert_allclose(features._stored(good, "float16", [1, 2]), good, atol=1e-5)
    for bad in (1e-7, 1e5, 1e25):
        rows = good.copy()
        rows[1] = bad
        with pytest.raises(InputError, match=r"1e-3 of their norm.* in the samples b\. Set feat"):
            features._stored(rows, "float16", ["a", "b"])


def test_a_subset_of_parameters(cases, tmp_path):
    """Only the last layer: the oracle's parameters are frozen but for that layer."""
    import copy

    case = cases["small_digits"]
    found = read_scores(case.stages(tmp_path, 1, proj_dim=50, parameters=["8.*"]))
    model = copy.deepcopy(case.models["c0"])

    class LastLayer(nn.Module):
        def __init__(self, body, head):
            super().__init__()
            self.body = [body]  # hidden from parameters()
            self.head = head

        def forward(self, x):
            return self.head(self.body[0](x))

    wrapped = LastLayer(model[:8].double().eval(), model[8])
    expected = oracle.scores(
        {"c0": wrapped},
        [case.train.samples[i] for i in range(len(case.train.ids))],
        [case.target_split.samples[i] for i in range(N_TARGETS)],
        output=case.output,
        proj_dim=50,
        damping=2,
    )
    assert_close(found.to_numpy(), expected, 1e-4)


def test_gradients_that_are_not_finite_name_samples_and_parameters(cases, tmp_path):
    case = cases["small_digits"]
    state = {k: v.clone() for k, v in case.models["c0"].state_dict().items()}
    state["6.weight"][:] = 3e38  # finite; what it gives is not
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=rf"samples {case.train.ids[0]}, .* in .*0\.weight"):
        run_stages(
            tmp_path / "results",
            case.path,
            {"bad": tmp_path / "bad.pt"},
            case.targets,
            model_output=case.output,
            proj_dim=8,
        )
    assert not list((tmp_path / "results").rglob("*.h5*"))


def test_most_training_samples_fitted_exactly_is_said(capsys):
    warn_of_saturation(torch.tensor([1e-4, -1e-5, 0.3]), "image_classification")
    assert "Warning: 67% of the training samples have a loss weight below 1e-3" in (
        capsys.readouterr().out
    )
    warn_of_saturation(torch.tensor([1e-4, 0.2, 0.3]), "image_classification")
    # Residuals of labels in metres, say.
    warn_of_saturation(torch.tensor([1e-4, -1e-5, 0.3]), "regression")
    assert not capsys.readouterr().out


def test_a_missing_gpu_is_an_error_and_no_other_device_takes_its_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"torch must find a CUDA device\. Found none"):
        projecting_device("cuda")


def test_a_missing_numba_cuda_is_found_before_any_gradient(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "is_simulated", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    machine.require_numba_cuda.cache_clear()
    with pytest.raises(InputError, match="needs the package numba-cuda"):
        projecting_device("cuda")
