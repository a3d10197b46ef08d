"""The code of docs/reference/evaluation-files.md and docs/explanation/scores.md."""

import numpy as np
import pandas as pd
from pages import blocks, follow
from scipy.stats import spearmanr


def test_two_runs_side_by_side(here):
    """Against scipy, with the other run's samples and targets in another order."""
    rng = np.random.default_rng(0)
    ids, targets = [f"s{i}" for i in range(60)], [3, 1, 2]
    ours = pd.DataFrame(rng.standard_normal((60, 3)), ids, targets)
    theirs = ours + rng.standard_normal((60, 3))
    for folder, frame in (("results", ours), ("other-results", theirs.iloc[::-1, ::-1])):
        (here / folder / "scores").mkdir(parents=True)
        frame.to_hdf(here / folder / "scores/mix.h5", key="scores")
    ((_, code),) = blocks("docs/reference/evaluation-files.md", "Agreement of two runs")
    exec(code, names := {})
    agreement = names["agreement"]
    assert agreement.index.tolist() == targets
    for target in targets:
        assert abs(agreement[target] - spearmanr(ours[target], theirs[target]).statistic) < 1e-12


def test_the_formula_is_what_the_package_computes(tmp_path, monkeypatch):
    assert follow("docs/explanation/scores.md", tmp_path, monkeypatch) == ["True\n"]
