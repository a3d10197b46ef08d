"""Two runs compared, against scipy and pandas."""

import pandas as pd
import pytest
from pipeline import read_scores
from scipy.stats import spearmanr
from small_run import Run

from trak_core.errors import InputError
from trak_core.stages import compare_runs as compare
from trak_core.stages.compare_runs import compare_runs


def test_two_runs_compared(run, tmp_path, monkeypatch):
    other = run.stages(tmp_path / "other", dim=20)
    path = tmp_path / "comparison.h5"
    compare_runs(comparison=path, runs={"mine": (run.scores, other)}, top=10, code="code")
    a, b = read_scores(run.scores), read_scores(other)
    table = pd.read_hdf(path, "targets").set_index("target_id")
    for target in run.targets:
        expected = spearmanr(a[target], b[target]).statistic
        assert abs(table.loc[target, "rank_correlation"] - expected) < 1e-12
        common = set(a[target].nlargest(10).index) & set(b[target].nlargest(10).index)
        assert table.loc[target, "overlap_positive"] == len(common) / 10
    monkeypatch.setattr(compare, "_BLOCK_BYTES", 1)  # one target at a time
    turned = Run.__new__(Run)
    turned.__dict__ |= {**vars(run), "targets": run.targets[::-1]}
    turned = turned.stages(tmp_path / "turned", dim=20)
    compare_runs(comparison=path, runs={"mine": (run.scores, turned)}, top=10, code="code")
    pd.testing.assert_frame_equal(pd.read_hdf(path, "targets").set_index("target_id"), table)
    compare_runs(comparison=path, runs={"mine": (other, other)}, top=10, code="code")
    means = pd.read_hdf(path, "experiments").iloc[0]
    assert abs(means["rank_correlation"] - 1) < 1e-12
    assert means["overlap_negative"] == 1
    fewer = Run.__new__(Run)
    fewer.__dict__ |= {**vars(run), "targets": run.targets[1:]}
    other = fewer.stages(tmp_path / "fewer")
    with pytest.raises(InputError, match=r"must have the same targets\. Found 4, such as"):
        compare_runs(comparison=path, runs={"mine": (run.scores, other)}, top=10, code="code")
