"""Exact scores: the stages against an independent float64 formula."""

from functools import cache

import numpy as np
import oracle
import pandas as pd
import pytest
import torch
from pipeline import changed, read_scores, run_exact_stages, scores_spec
from trained_cases import Case, assert_close

from trak_core.errors import InputError
from trak_core.gradients import check_finite_gramian
from trak_core.provenance import content_digest
from trak_core.stages import compute_gramian as gramian
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_exact_scores import compute_exact_scores


class ExactCase(Case):
    """A study with three trained checkpoints, its scores without a projection."""

    def stages(self, results, n_checkpoints=3, path=None, **settings):
        checkpoints = dict(list(self.checkpoints.items())[:n_checkpoints])
        return run_exact_stages(
            results,
            path or self.path,
            checkpoints,
            self.targets,
            model_output=self.output,
            **settings,
        )


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.set_num_threads(1)
    return {name: ExactCase(name, folder) for name in ("small_digits", "diabetes")}


@pytest.fixture(params=["small_digits", "diabetes"])
def case(request, cases):
    return cases[request.param]


@pytest.fixture(scope="module")
def made(cases, tmp_path_factory):
    """A run of each study, for its Gramians: settings of scoring leave them be."""

    @cache
    def run(name):
        folder = tmp_path_factory.mktemp("made")
        cases[name].stages(folder, damping=2)
        return folder

    return run


@pytest.mark.parametrize(
    ("n_checkpoints", "combine", "weighting", "power", "normalize"),
    [
        (1, "product_of_averages", "plain", 0.5, False),
        (3, "product_of_averages", "plain", 0.5, False),
        (3, "product_of_averages", "curvature", 0.5, False),
        (3, "average_of_products", "curvature", 1, False),
        (3, "average_of_products", "plain", 1, True),
        (3, "unit_average", "curvature", 0.75, False),
        (3, "unit_average", "curvature", 0.75, True),
        (3, "unit_average", "plain", 1, False),
    ],
)
def test_scores_equal_the_formula_in_float64(
    case, made, tmp_path, n_checkpoints, combine, weighting, power, normalize
):
    settings = {"damping": 2, "weighting": weighting, "power": power, "combine": combine}
    settings["normalize"] = normalize
    gramians = made(case.path.stem)
    found = read_scores(case.stages(tmp_path, n_checkpoints, made=gramians, **settings))
    assert found.index.tolist() == case.train.ids
    assert found.columns.tolist() == case.targets
    assert_close(found.to_numpy(), case.expected(n_checkpoints, **settings), 1e-5)


@pytest.mark.parametrize("weighting", ["plain", "curvature"])
def test_without_damping_where_the_gramian_is_well_conditioned(case, tmp_path, weighting):
    """Ten training samples: a float32 gradient is lost by the condition number."""
    text = case.path.read_text()
    for n_train in ("[:150]", "[:342]"):
        text = text.replace(n_train, "[:10]")
    path = tmp_path / case.path.name
    path.write_text(text)
    settings = {"damping": 0, "weighting": weighting}
    found = read_scores(case.stages(tmp_path / "results", path=path, **settings))
    assert_close(found.to_numpy(), case.expected(n_train=10, **settings), 1e-5)


@pytest.mark.parametrize("other", [{"batch_size": 7}, {"batch_size": 500}, {"memory_mb": 1}])
def test_batches_and_memory_do_not_change_scores(cases, tmp_path, other):
    case = cases["small_digits"]
    first = read_scores(case.stages(tmp_path / "first", 1)).to_numpy()
    second = read_scores(case.stages(tmp_path / "second", 1, **other)).to_numpy()
    assert_close(second, first, 1e-5)


def test_a_gramian_is_symmetric_and_carries_what_features_carry(cases, tmp_path):
    case = cases["small_digits"]
    final = case.stages(tmp_path, 1, batch_size=32)
    path = tmp_path / "gramian/c0/train.h5"
    square = pd.read_hdf(path, "gramian")
    assert square.index.tolist() == square.columns.tolist() == case.train.ids
    np.testing.assert_array_equal(square, square.T)
    assert set(square.dtypes) == {np.dtype(np.float64)}
    cross = pd.read_hdf(tmp_path / "gramian/c0/mine.h5", "gramian")
    assert cross.index.tolist() == case.train.ids
    assert cross.columns.tolist() == case.targets
    samples = [case.train.samples[i] for i in range(len(case.train.ids))]
    model = case.models["c0"].double().eval()
    try:
        j, f, y = oracle.jacobian(model, samples, case.output)
    finally:
        model.float()
    assert_close(square.to_numpy(), j @ j.T, 1e-5)
    table = pd.read_hdf(final, "train")
    np.testing.assert_array_equal(table["label"], y)
    np.testing.assert_allclose(table["output"], f, rtol=1e-4, atol=1e-4)


def test_a_subset_of_parameters(cases, tmp_path):
    case = cases["small_digits"]
    case.stages(tmp_path, 1, parameters=["8.*"])
    found = pd.read_hdf(tmp_path / "gramian/c0/train.h5", "gramian").to_numpy()
    samples = [case.train.samples[i] for i in range(len(case.train.ids))]
    model = case.models["c0"].double().eval()
    try:
        j = oracle.jacobian(model, samples, case.output)[0][:, -170:]  # the last layer's
    finally:
        model.float()
    assert_close(found, j @ j.T, 1e-5)


def test_a_second_run_writes_the_same_bytes(cases, tmp_path):
    for run in ("first", "second"):
        cases["small_digits"].stages(tmp_path / run, 1)
    files = sorted(p.relative_to(tmp_path / "first") for p in (tmp_path / "first").rglob("*.h5"))
    assert len(files) == 4
    for file in files:
        first, second = ((tmp_path / run / file).read_bytes() for run in ("first", "second"))
        assert first == second, file


def test_a_singular_gramian_is_explained(cases, tmp_path):
    with pytest.raises(InputError, match=r"condition number .* Raise `scoring.damping`"):
        cases["diabetes"].stages(tmp_path, 1, damping=0)
    assert not (tmp_path / "scores").exists()


def test_a_budget_that_is_too_small_is_refused_by_the_jobs(cases, tmp_path):
    found = (
        r"must hold a Gramian of 342 x 342 inner products: 1 MiB\. Found 0\. Raise it, take a proj"
    )
    with pytest.raises(InputError, match=found):
        cases["diabetes"].stages(tmp_path, 1, memory_mb=0)
    assert not list(tmp_path.rglob("*.h5"))


@pytest.mark.parametrize(
    ("key", "expected"),
    [("6.weight", r"Model outputs must be finite.* for the samples \d+, .* and more")],
)
def test_not_a_number_names_samples(cases, tmp_path, key, expected):
    case = cases["small_digits"]
    state = {k: v.clone() for k, v in case.models["c0"].state_dict().items()}
    state[key].fill_(3e38)  # finite weights; sums of them are not
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(InputError, match=expected):
        run_exact_stages(
            tmp_path / "results",
            case.path,
            {"bad": tmp_path / "bad.pt"},
            case.targets,
            model_output=case.output,
        )
    assert not list((tmp_path / "results").rglob("*.h5*"))


def test_a_gradient_that_is_not_finite_names_its_sample():
    """Its row and column are, whichever split it is in; others are not blamed."""
    values = np.ones((4, 4))
    values[2], values[:, 2] = np.nan, np.nan
    with pytest.raises(InputError, match=r"for the samples c\. Look"):
        check_finite_gramian(values, list("abcd"), list("abcd"))
    values = np.ones((4, 3))
    values[:, 1] = np.inf
    with pytest.raises(InputError, match=r"for the samples y\. Look"):
        check_finite_gramian(values, list("abcd"), list("xyz"))
    values = np.ones((3, 3))
    values[0, 0] = np.inf
    with pytest.raises(InputError, match=r"for the samples a\. Look"):
        check_finite_gramian(values, list("abc"), list("abc"))


def test_memory_that_runs_out_halves_the_blocks(cases, tmp_path, monkeypatch, capsys):
    case, real = cases["small_digits"], gramian.train_gramian

    def tight(model, parameters, output, blocks):
        if len(blocks[0]) > 20:
            raise torch.OutOfMemoryError("no memory for so many")
        return real(model, parameters, output, blocks)

    expected = read_scores(case.stages(tmp_path / "first", 1)).to_numpy()
    monkeypatch.setattr(gramian, "train_gramian", tight)
    found = read_scores(case.stages(tmp_path / "second", 1)).to_numpy()
    assert "going on with 16 samples at once" in capsys.readouterr().out
    assert_close(found, expected, 1e-5)


@pytest.fixture(scope="module")
def finished(cases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    case = cases["small_digits"]
    case.stages(folder, 2)
    spec = scores_spec(
        ["c0", "c1"],
        case.targets,
        model_output=case.output,
        projection={"kind": "exact"},
        dtype="float64",
    )
    return folder, spec


OTHER_CONFIGS = [
    ("projection", {"kind": "rademacher", "proj_dim": 32, "seed": 0}),
    ("study_digest", "another"),
    ("parameter_patterns", ["8.*"]),
    ("targets_digest", content_digest([1, 2])),
]


@pytest.mark.parametrize(("key", "value"), [*OTHER_CONFIGS, ("experiment", "other")])
def test_gramians_of_another_config_are_refused(finished, tmp_path, key, value):
    folder, spec = finished
    said = "split" if key == "experiment" else key
    with pytest.raises(InputError, match=rf"c1/\w+\.h5.*{said}.*rule compute_gramian remakes it"):
        compute_exact_scores(
            scores=tmp_path / "out.h5",
            train_path=folder / "gramian/c1/train.h5",
            targets_path=folder / "gramian/c1/mine.h5",
            spec=changed(spec, **{key: value}).under("c1"),
            code="code",
            memory_mb=100,
        )
    assert not (tmp_path / "out.h5").exists()


def test_gramians_of_two_checkpoints_are_refused(finished, tmp_path):
    folder, spec = finished
    with pytest.raises(InputError, match=r"c0/mine\.h5.*checkpoint"):
        compute_exact_scores(
            scores=tmp_path / "out.h5",
            train_path=folder / "gramian/c1/train.h5",
            targets_path=folder / "gramian/c0/mine.h5",
            spec=spec.under("c1"),
            code="code",
            memory_mb=100,
        )


@pytest.mark.parametrize(("key", "value"), [*OTHER_CONFIGS, ("damping", 1)])
def test_scores_of_another_config_are_refused(finished, tmp_path, key, value):
    """Exact scores under a projection, too; the other way round is a case of test_scores."""
    folder, spec = finished
    rule = "compute_scores" if key == "projection" else "compute_exact_scores"
    with pytest.raises(InputError, match=rf"mine/c0\.h5.*{key}.*rule {rule} remakes it"):
        average_scores(
            columns="",
            scores=tmp_path / "out.h5",
            checkpoint_scores=[folder / f"scores/mine/c{i}.h5" for i in range(2)],
            features=[],
            spec=changed(spec, **{key: value}),
            defaults="",
            top=3,
            code="code",
            memory_mb=100,
        )
    assert not (tmp_path / "out.h5").exists()
