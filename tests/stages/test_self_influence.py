"""Self-influence: the stage against dense matrices."""

import h5py
import numpy as np
import oracle
import pandas as pd
import pytest
from pipeline import changed
from scipy.special import logit
from small_run import OUTPUT, loss_weights, stored

from trak_core.stages.compute_scores import compute_self_influence

UNIT = {"combine": "unit_average", "weighting": "curvature", "power": 0.75}


@pytest.mark.parametrize(
    "settings", [{}, UNIT, UNIT | {"normalize": True}], ids=["ends", "along", "normalized"]
)
def test_self_influence_is_the_diagonal(run, tmp_path, settings):
    """A training sample is its own target. Outputs are those of each run's last checkpoint."""
    settings = {"power": 0.5, **settings}
    run.stages(tmp_path / "run", **settings)
    power = settings["power"]
    powers = {f"{key}_power": power for key in ("curvature", "norm", "loss_weight")}
    others = {key: value for key, value in settings.items() if key != "power"}
    runs = {"a": ["c0", "c1"], "b": ["c2"]}
    of_no_experiment = run.spec.of_self_influence()
    spec = changed(of_no_experiment, **(powers if others else {}), **others, runs=runs)
    compute_self_influence(
        self_influence=tmp_path / "self.h5",
        features=run.features("train"),
        normal_matrices=[tmp_path / f"run/normal_matrix/{c}.h5" for c in run.checkpoints],
        spec=spec,
        code="code",
        memory_mb=300,
    )
    table = pd.read_hdf(tmp_path / "self.h5", "train")
    features = [phi.astype(float) for phi in stored(run, "features")]
    weights = loss_weights(run)
    parts = [(phi, phi, -logit(q), None) for phi, q in zip(features, weights, strict=True)]
    expected = np.diagonal(oracle.scores(parts, output=OUTPUT, damping=2, **settings))
    # Curvatures are stored in float32.
    bound = 1e-5 if others else 1e-9
    assert np.abs(table["self_influence"] - expected).max() < bound * expected.max()
    assert table["id"].tolist() == run.train.ids
    ends = run.features("train")[1:]
    outputs = np.mean([h5py.File(path)["outputs"][:] for path in ends], axis=0)
    np.testing.assert_allclose(table["output"], outputs, rtol=1e-5)
