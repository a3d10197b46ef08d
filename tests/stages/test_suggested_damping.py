"""What normal matrices keep of the damping that a run suggests, and what the report makes of it."""

from dataclasses import replace

import h5py
import numpy as np
import pandas as pd
import pytest
from reported import results_of

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.report.read_results import read_matrix, suggested_damping
from trak_core.report.render import study_warnings
from trak_core.scoring.suggest_damping import DAMPINGS

UNIT = {"combine": "unit_average", "power": 0.75}


@pytest.mark.parametrize("memory_mb", [1, 500])
@pytest.mark.parametrize("weighting", ["plain", "curvature"])
def test_a_normal_matrix_keeps_what_the_features_foretell(digits, tmp_path, weighting, memory_mb):
    """Beside inner products of all samples, however many rows are read at once."""
    digits.stages(
        tmp_path,
        1,
        proj_dim=16,
        made=digits.features(16),
        memory_mb=memory_mb,
        weighting=weighting,
        **UNIT,
    )
    with open_artifact(digits.features(16) / "features/c0/train.h5", FEATURES) as file:
        phi = file.matrix("features")[:].astype(np.float64)
        q, outputs = (file.vector(key).astype(np.float64) for key in ("loss_weights", "outputs"))
        weights = file.vector("curvature") ** 0.75 if weighting == "curvature" else np.ones(len(q))
    kernel = phi @ phi.T
    kept = pd.read_hdf(tmp_path / "normal_matrix/c0.h5", "foretold_changes")
    assert [float(name) for name in kept.columns] == list(DAMPINGS)
    assert kept.index.tolist() == list(range(len(q)))
    for damping, own in zip(DAMPINGS, kept.to_numpy().T, strict=True):
        ridge = damping * (weights * np.diagonal(kernel)).mean()
        expected = kernel @ np.linalg.solve(weights[:, None] * kernel + ridge * np.eye(len(q)), q)
        np.testing.assert_allclose(own, expected, rtol=2e-3, atol=1e-3 * np.abs(expected).max())
    with h5py.File(tmp_path / "normal_matrix/c0.h5") as file:
        np.testing.assert_array_equal(file["foretold_outputs"][:], outputs)
        lengths = np.linalg.norm(phi, axis=1)
        np.testing.assert_allclose(file["foretold_lengths"][:], lengths, rtol=1e-6)


def test_the_ends_of_runs_alone_keep_nothing(digits, tmp_path):
    digits.stages(tmp_path, 2, proj_dim=16, made=digits.features(16))
    matrix = read_matrix(tmp_path / "normal_matrix/c0.h5", tmp_path)
    assert set(matrix.attributes) == {"smallest", "largest", "mean_squared_norm"}


def _results(happened, early=("r",), **spec):
    """Two checkpoints of one run: foretold changes are those of a filter with each damping."""
    rng = np.random.default_rng(0)
    sizes, sides = np.geomspace(1, 1e-3, 30), rng.standard_normal((400, 30))
    foretells = np.stack([sides @ (sizes / (sizes + 0.1 * d)) for d in DAMPINGS], axis=1)
    results = results_of()
    first, last = (replace(results.matrices[0], spec={"checkpoint": {"id": c}}) for c in "ab")
    moved = {"foretells": foretells, "lengths": np.abs(sides[:, 0]), "outputs": np.zeros(400)}
    outputs = foretells[:, DAMPINGS.index(happened)] + 0.1 * rng.standard_normal(400)
    first = replace(first, attributes=first.attributes | moved)
    last = replace(last, attributes=last.attributes | moved | {"outputs": outputs})
    experiment = results.experiments[0]
    experiment = replace(experiment, spec={**experiment.spec, "runs": {"r": ["a", "b"]}, **spec})
    config = results.config | {"scoring": {"damping": 2}}
    matrices = {"matrices": [last, first], "early_runs": early}
    return replace(results, config=config, experiments=[experiment], **matrices)


@pytest.mark.parametrize("happened", [0.1, 30.0])
def test_a_damping_that_training_contradicts_is_warned_of(happened):
    results = _results(happened)
    suggested = suggested_damping(results)
    assert suggested is not None
    assert suggested.damping == happened
    assert [warning.name for warning in study_warnings(results)] == ["damping"]


def test_a_damping_that_fits_scores_of_directions_and_late_checkpoints_are_not_warned_of():
    fits = replace(_results(1.0), config=results_of().config | {"scoring": {"damping": 1}})
    assert study_warnings(fits) == []
    for results in (_results(0.1, normalize=True), _results(0.1, early=())):
        assert suggested_damping(results) is None
        assert study_warnings(results) == []
