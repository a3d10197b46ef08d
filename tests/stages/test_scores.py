"""The stages, end to end in one process, against an independent float64 implementation."""

from functools import cache
from importlib.metadata import version

import h5py
import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from linear_study import SPEC, with_two_checkpoints
from pipeline import averaged, read_scores, run_stages
from refused import refused
from scipy.stats import spearmanr
from trained_cases import assert_close

from trak_core.artifacts import CHECKPOINT_SCORES, SCORES, open_artifact, scaled_integers
from trak_core.attribution.device import find_device
from trak_core.attribution.project_gradients import QueuedFeatures, stored_rows
from trak_core.attribution.sample_outputs import warn_of_saturation
from trak_core.errors import InputError
from trak_core.gradients import Variety
from trak_core.projection.cuda import project as project_cuda

# All checkpoints of a run count alike. Tables have the outputs of each run's last one.
RUNS = {"a": ["c0", "c1"], "b": ["c2"]}
# Each setting with one of the studies, because scoring depends only on arrays. Every value of a
# setting occurs with both studies, and with every `combine`.
SETTINGS = [
    ("small_digits", 1, "product_of_averages", 2, 160, "plain", 0.5, False),
    ("small_digits", 3, "product_of_averages", 2, 160, "plain", 0.5, True),
    ("diabetes", 3, "product_of_averages", 0, 16, "plain", 1, False),
    ("small_digits", 3, "product_of_averages", 2, 160, "curvature", 0.5, False),
    ("diabetes", 3, "average_of_products", 2, 160, "curvature", 1, False),
    ("small_digits", 3, "average_of_products", 0, 16, "plain", 0.5, False),
    ("small_digits", 3, "unit_average", 2, 160, "curvature", 0.75, False),
    ("diabetes", 3, "unit_average", 2, 160, "curvature", 0.75, True),
    ("diabetes", 3, "unit_average", 0, 16, "plain", 1, False),
    ("diabetes", 1, "product_of_averages", 2, None, "plain", 0.5, False),
    ("diabetes", 3, "product_of_averages", 2, None, "curvature", 0.5, False),
    ("small_digits", 3, "average_of_products", 2, None, "curvature", 1, False),
    ("diabetes", 3, "average_of_products", 2, None, "plain", 1, True),
    ("small_digits", 3, "unit_average", 2, None, "curvature", 0.75, True),
    ("small_digits", 3, "unit_average", 2, None, "plain", 1, False),
]


@pytest.mark.parametrize(
    ("name", "n_checkpoints", "combine", "damping", "proj_dim", "weighting", "power", "normalize"),
    SETTINGS,
)
def test_scores_equal_the_formula_in_float64(
    cases, tmp_path, name, n_checkpoints, combine, damping, proj_dim, weighting, power, normalize
):
    case = cases[name]
    settings = {
        "damping": damping,
        "proj_dim": proj_dim,
        "weighting": weighting,
        "power": power,
        "combine": combine,
        "normalize": normalize,
    }
    made = {"made": case.features(proj_dim), "runs": RUNS if n_checkpoints == 3 else None}
    path = case.stages(tmp_path, n_checkpoints, **made, **settings)
    scores = read_scores(path)
    assert scores.index.tolist() == case.train.ids
    assert scores.columns.tolist() == case.targets
    with open_artifact(path, SCORES) as file:
        is_output_s = (weighting, power, normalize) == ("curvature", 1, False)
        says = "that of" if is_output_s and combine != "unit_average" else "relative"
        assert file.attribute("unit").startswith(says)
    bound = 1e-5 if proj_dim is None else 1e-4
    assert_close(scores.to_numpy(), case.expected(n_checkpoints, **settings), bound)


@pytest.fixture(scope="module")
def scored(digits, tmp_path_factory):
    """Scores of images under one checkpoint, by the projection's dimensions or none."""
    return cache(
        lambda proj_dim: digits.stages(
            tmp_path_factory.mktemp("scored"), 1, proj_dim=proj_dim, made=digits.features(proj_dim)
        )
    )


@pytest.mark.parametrize(
    ("proj_dim", "other"),
    [
        (16, {"shards": 3, "batch_size": 1}),
        (16, {"batch_size": 41, "memory_mb": 1}),
        (None, {"batch_size": 500}),
        (None, {"batch_size": 41, "memory_mb": 1}),
    ],
)
def test_shards_batches_and_memory_do_not_change_scores(digits, scored, tmp_path, proj_dim, other):
    first = scored(proj_dim)
    second = digits.stages(tmp_path / "second", 1, proj_dim=proj_dim, **other)
    assert_close(*(read_scores(path).to_numpy() for path in (second, first)), 1e-5)


@pytest.mark.parametrize(
    ("name", "proj_dim", "n_files"), [("diabetes", 16, 13), ("small_digits", None, 10)]
)
def test_a_second_run_writes_the_same_bytes(cases, tmp_path, name, proj_dim, n_files):
    cases[name].stages(tmp_path, proj_dim=proj_dim)
    first = cases[name].features(proj_dim)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.h5"))
    assert len(files) == n_files
    for file in files:
        assert (tmp_path / file).read_bytes() == (first / file).read_bytes(), file


def test_top_influences_are_the_extremes_of_the_scores(case):
    path = case.features(16) / "scores/mine.h5"
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


UNIT = {"combine": "unit_average", "weighting": "curvature", "power": 0.75}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("small_digits", {}), ("small_digits", UNIT), ("diabetes", {"normalize": True})],
)
def test_top_k_keeps_the_same_influences_without_the_matrix(cases, tmp_path, name, settings):
    case = cases[name]
    settings = {"proj_dim": 16, "top": 4, "made": case.features(16), "memory_mb": 1, **settings}
    full = case.stages(tmp_path / "full", **settings)
    top_k = case.stages(tmp_path / "top_k", keep="top_k", **settings)
    tables = [pd.read_hdf(path, "top_influences") for path in (top_k, full)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-5)
    with pytest.raises(KeyError):
        pd.read_hdf(top_k, "scores")


def test_a_target_asked_alone_gets_the_same_scores(digits, tmp_path):
    """The norm of a checkpoint is that of its scores on training samples."""
    features = digits.features(16)
    together = digits.stages(tmp_path / "together", proj_dim=16, made=features, **UNIT)
    target = digits.targets[1]
    alone = digits.stages(tmp_path / "alone", proj_dim=16, targets=[target], **UNIT)
    assert_close(read_scores(alone)[target], read_scores(together)[target], 1e-5)


@pytest.mark.parametrize(
    ("name", "proj_dim", "memory_mb", "size"),
    [
        ("small_digits", 300, 1, "3 MiB for a normal matrix with proj_dim 300"),
        ("diabetes", None, 0, "1 MiB for a Gramian of 342 x 342 inner products"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(cases, tmp_path, name, proj_dim, memory_mb, size):
    expected = rf"compute\.memory_mb must be at least {size}\. Found {memory_mb}\. Raise "
    with pytest.raises(InputError, match=expected):
        cases[name].stages(tmp_path, 1, memory_mb=memory_mb, proj_dim=proj_dim)
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.h5")} <= {"features"}


@pytest.mark.parametrize(("proj_dim", "runs"), [(16, None), (None, None), (16, RUNS)])
def test_tables_have_labels_and_outputs(case, tmp_path, proj_dim, runs):
    path = case.stages(tmp_path, proj_dim=proj_dim, made=case.features(proj_dim), runs=runs)
    ends = [names[-1] for names in runs.values()] if runs else [*case.checkpoints]
    for i, (key, split) in enumerate((("train", case.train), ("targets", case.target_split))):
        table = pd.read_hdf(path, key)
        assert table["id"].tolist() == split.ids
        labels = [sample[-1].item() for sample in case.samples(split)]
        np.testing.assert_array_equal(table["label"], labels)
        f = [case.jacobians[checkpoint][i][1] for checkpoint in ends]
        np.testing.assert_allclose(table["output"], np.mean(f, axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(table["output_sd"], np.std(f, axis=0), rtol=1e-3, atol=1e-4)


def test_tables_have_the_mean_loss_weight_and_files_their_provenance(case):
    path, weights = case.features(16) / "scores/mine.h5", []
    for file in sorted(path.with_suffix("").iterdir()):
        with open_artifact(file, CHECKPOINT_SCORES) as part:
            weights.append(part.vector("loss_weights"))
    assert len(weights) == len(case.models)
    averages = pd.read_hdf(path, "train")["loss_weight"]
    np.testing.assert_allclose(averages, np.mean(weights, axis=0), rtol=1e-6)
    with open_artifact(path, SCORES) as file:
        (of_scores,) = file.provenance["made_from"]
    (of_features,) = of_scores["made_from"]
    assert of_features["torch"] == version("torch")


@pytest.mark.parametrize(("name", "proj_dim"), [("small_digits", 160), ("diabetes", None)])
def test_a_singular_matrix_is_explained(cases, tmp_path, name, proj_dim):
    case = cases[name]
    with pytest.raises(InputError, match=r"condition number .* Raise `scoring.damping`"):
        case.stages(tmp_path, 1, proj_dim=proj_dim, damping=0, made=case.features(proj_dim))
    assert not (tmp_path / "scores").exists()


def test_float16_features(digits, tmp_path):
    scores = read_scores(digits.stages(tmp_path, 1, proj_dim=160, dtype="float16"))
    assert_close(scores.to_numpy(), digits.expected(1, proj_dim=160, damping=2), 5e-3)


def test_int8_features(digits, tmp_path):
    """Joining shards leaves every integer and every scale as they were."""
    given = {"float32": {}, "int8": {"shards": 3}}
    scores = [
        read_scores(
            digits.stages(tmp_path / dtype, 1, proj_dim=160, dtype=dtype, **more)
        ).to_numpy()
        for dtype, more in given.items()
    ]
    assert min(spearmanr(*np.stack(scores)[:, :, i]).statistic for i in range(7)) > 0.999
    parts = []
    for name in ("train", "train-1", "train-2", "train-3"):
        with h5py.File(tmp_path / f"int8/features/c0/{name}.h5") as file:
            parts.append([file[f"features{key}"][:] for key in ("/block0_values", "_scales")])
    for whole, *shards in zip(*parts, strict=True):
        assert np.array_equal(whole, np.concatenate(shards))
    assert parts[0][0].dtype == np.int8


@pytest.mark.parametrize("k", [1, 3, 512])
def test_int8_rows_are_the_nearest_and_stored_again_the_same(k):
    """Against the definition; sizes go from the smallest of float32 to the largest."""
    rng = np.random.default_rng(k)
    rows = rng.standard_normal((300, k)) * np.geomspace(1e-44, 1e37, 300)[:, None]
    rows = np.vstack([rows, np.zeros(k)]).astype(np.float32)
    whole, scales = scaled_integers(rows)
    most = np.abs(rows).max(axis=1).astype(float)
    assert (scales >= most / 127).all()
    assert (scales <= most / 127 * (1 + 2**-16) + 2**-149).all()
    exact = whole.astype(float) * scales.astype(float)[:, None]
    assert (np.abs(exact - rows) <= scales[:, None] * 0.5000001).all()
    read = whole * scales[:, None]
    assert read.dtype == np.float32
    assert np.array_equal(read, exact)
    again = scaled_integers(read)
    same = (most == 0) | (most > 1e-37)
    assert np.array_equal(again[0][same], whole[same])
    assert np.array_equal(again[1][same], scales[same])


def test_rounding_that_loses_a_sample_is_an_error():
    """A few entries that vanish cost nothing. A sample must not vanish."""
    small = np.full((3, 1000), 1e-2, dtype=np.float32)
    small[:, ::10] = 1e-9
    normal = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    for dtype, good, bound in (("float16", small, 1e-5), ("int8", normal, 0.016)):
        good[1] = 0
        np.testing.assert_allclose(stored_rows(good, dtype, [1, 2, 3]), good, atol=bound)
    for bad in (1e-7, 1e5, 1e25):
        small[2] = bad
        with refused("stages.features_dtype", f"from {bad:.2g} to {bad:.2g}", "samples c"):
            stored_rows(small, "float16", ["a", "b", "c"])
    for far, loss in ((1e3, "0.031"), (np.nan, "nan"), (np.inf, "nan")):
        normal[2, 7] = far
        with refused("stages.features_dtype", f"up to {loss}", "samples c"):
            stored_rows(normal, "int8", ["a", "b", "c"])


def test_a_subset_of_parameters(digits, tmp_path):
    """Only the last layer, whose parameters are the last ones."""
    scores = read_scores(digits.stages(tmp_path, 1, proj_dim=50, parameters=["8.*"]))
    jacobians = {
        "c0": [(gradients[:, -170:], *others) for gradients, *others in digits.jacobians["c0"]]
    }
    parts = oracle.parts(jacobians, 50)
    assert_close(scores.to_numpy(), oracle.scores(parts, output=digits.output, damping=2), 1e-4)


@pytest.mark.parametrize(
    ("proj_dim", "expected"),
    [
        (8, r"samples {}, .* in .*0\.weight"),
        (None, r"Model outputs and inner .* must be finite.* for the samples \d+, .* and \d+ more"),
    ],
)
def test_not_a_number_names_samples_and_parameters(digits, tmp_path, proj_dim, expected):
    # Finite weights; what they give is not.
    bad = digits.spoiled(tmp_path / "bad.pt", lambda state: state["6.weight"].fill_(3e38))
    with pytest.raises(InputError, match=expected.format(digits.train.ids[0])):
        digits.stages(tmp_path / "results", checkpoints=bad, proj_dim=proj_dim)
    assert not list((tmp_path / "results").rglob("*.h5*"))


@pytest.mark.parametrize("proj_dim", [8, None])
@pytest.mark.parametrize("code", ["all_zero", "all_alike"])
def test_gradients_without_information_are_refused(digits, tmp_path, code, proj_dim):
    """Layers below a head of zeros, and the last bias of a regression, whose gradient is 1."""
    results = tmp_path / "results"
    with refused(f"gradients.{code}", f"all {30 if code == 'all_alike' else 150} training samples"):
        if code == "all_zero":
            bad = digits.spoiled(tmp_path / "bad.pt", lambda state: state["8.weight"].zero_())
            digits.stages(results, checkpoints=bad, proj_dim=proj_dim, parameters=["0.*"])
        study, checkpoints, targets = with_two_checkpoints(tmp_path)
        given = {"model_output": "regression", "parameters": ["bias"], "proj_dim": proj_dim}
        run_stages(results, study, checkpoints, targets, **given)
    assert not list(results.rglob("*.h5*"))


def test_features_that_differ_by_rounding_alone_are_refused_as_int8_too(
    digits, tmp_path, monkeypatch
):
    """Their integers may differ where a half is rounded. Scores would be rounding errors."""

    def alike(features):
        rows, *columns = wait(features)
        noise = torch.from_numpy(np.random.default_rng(len(rows)).standard_normal(rows.shape))
        return [(1 - 1 / 254 + 1e-6 * noise * (rows != 0)).float(), *columns]

    wait = QueuedFeatures.wait
    monkeypatch.setattr(QueuedFeatures, "wait", alike)
    with refused("gradients.all_alike", "150 training samples"):
        digits.stages(tmp_path, 1, proj_dim=160, dtype="int8")


def test_many_gradients_of_zero_have_a_warning(capsys):
    rows = np.ones((5, 3), dtype=np.float32)
    for n_zero, warns in ((2, False), (3, True)):
        rows[:n_zero] = 0
        seen = Variety()
        seen.add(rows[:2])
        seen.add(rows[2:])
        seen.check("targets", must_differ=True)
        assert ("3 of 5 targets are 0 in every entry" in capsys.readouterr().out) is warns
    for same, must_differ in ((rows[3:], False), (rows[:1], True), (rows[4:], True)):
        seen = Variety()
        seen.add(same)
        seen.check("targets", must_differ=must_differ)


def test_a_warning_if_most_training_samples_have_tiny_loss_weights(capsys):
    """Not for regression, whose loss weights have the unit of the label."""
    for weights, output, warns in (
        ([1e-4, -1e-5, 0.3], "image_classification", True),
        ([1e-4, 0.2, 0.3], "image_classification", False),
        ([1e-4, -1e-5, 0.3], "regression", False),
    ):
        warn_of_saturation(torch.tensor(weights), output)
        assert ("Warning: 67% of the training samples" in capsys.readouterr().out) is warns


def test_a_missing_gpu_or_numba_cuda_is_an_error_before_any_gradient(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused("attribution.no_cuda", "CUDA device"):
        find_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(project_cuda, "is_simulated", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    project_cuda.require_numba_cuda.cache_clear()
    with pytest.raises(InputError, match="numba-cuda"):
        find_device("cuda", projects=True)


def test_ids_are_as_long_as_paths(tmp_path):
    """255 bytes, umlauts among them, in every stage's file and in pandas' queries."""
    study, checkpoints, _ = with_two_checkpoints(tmp_path)
    code = study.read_text().replace("target-{i}", "{'ä/' * 84}{i:03}")
    code += "def train_ids():\n    return ['x' * 250 + f'-{i}' for i in range(30)]\n"
    study.write_text(code)
    targets = [f"{'ä/' * 84}{i:03}" for i in (3, 1)]
    settings = {"model_output": "regression", "proj_dim": 8, "keep": "full"}
    file = run_stages(tmp_path / "results", study, checkpoints, targets, **settings)
    scores = pd.read_hdf(file, "scores")
    assert scores.columns.tolist() == targets
    best = scores[targets[0]].idxmax()
    where = f"target_id == '{targets[0]}' & rank == 1 & score > 0"
    assert pd.read_hdf(file, "top_influences", where=where).train_id.tolist() == [best]


COLUMNS = """

def train_columns():
    return {"annotator": ["anna", "bert", "anna"] * 10}


def target_columns():
    return {"page": list(range(10))}
"""


def test_tables_have_help_harm_and_the_columns_of_the_study(tmp_path):
    study, checkpoints, targets = with_two_checkpoints(tmp_path)
    path = run_stages(tmp_path, study, checkpoints, targets, model_output="regression")
    scores, train = read_scores(path).astype(float), pd.read_hdf(path, "train")
    about = pd.read_hdf(path, "targets").set_index("id")
    gains = scores * np.sign(about["label"] - about["prediction"])
    assert_close(train["help"], gains.clip(lower=0).mean(axis=1), 1e-6)
    assert_close(train["harm"], -gains.clip(upper=0).mean(axis=1), 1e-6)
    parts = sorted((tmp_path / "scores/mine").glob("*.h5"))
    with open_artifact(path, SCORES) as file:
        before = file.content_hash
    study.write_text(study.read_text() + COLUMNS)
    again = averaged(tmp_path / "again.h5", parts, SPEC, study_file=study)
    assert pd.read_hdf(again, "train", where="id == 4")["annotator"].tolist() == ["bert"]
    assert pd.read_hdf(again, "targets")["page"].tolist() == [3, 1, 7]
    assert read_scores(again).equals(read_scores(path))
    with open_artifact(again, SCORES) as file:
        assert file.table("train")["annotator"].tolist() == ["anna", "bert", "anna"] * 10
        assert file.content_hash != before
