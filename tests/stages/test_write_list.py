"""Lists out of files: scores, self-influence, features."""

import pandas as pd
import pytest
from linear_study import with_two_checkpoints
from pipeline import run_stages, scores_spec

from trak_core.artifacts import ArtifactError
from trak_core.stages.find_duplicates import find_duplicates
from trak_core.stages.write_list import write_list

PROJECTION = {"kind": "rademacher", "proj_dim": 8, "seed": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run whose training samples 4 and 9, and target 1 and sample 6, are copies."""
    folder = tmp_path_factory.mktemp("lists")
    study, checkpoints, targets = with_two_checkpoints(folder)
    study.write_text(study.read_text() + "\nx[9], y[9] = x[4], y[4]\nx[31], y[31] = x[6], y[6]\n")
    given = {"model_output": "regression", "proj_dim": 8, "kind": "rademacher"}
    path = run_stages(folder, study, checkpoints, targets, **given)
    return folder, path, scores_spec(
        checkpoints, targets, model_output="regression", projection=PROJECTION
    )  # fmt: skip


@pytest.mark.parametrize("memory_mb", [1, 500])
def test_planted_copies_are_found(finished, tmp_path, memory_mb):
    folder, _, spec = finished
    find_duplicates(
        listed=tmp_path / "duplicates.csv",
        train_path=folder / "features/c0/train.h5",
        targets_path=folder / "features/c0/mine.h5",
        spec=spec.under("c0"),
        code="code",
        memory_mb=memory_mb,
    )
    pairs = pd.read_csv(tmp_path / "duplicates.csv")
    exact = pairs[pairs["closeness"] == 1]
    assert exact[["id", "other_id", "among"]].to_numpy().tolist() == [
        [9, "4", "train"],
        [6, "target-1", "mine"],
    ]
    assert exact["label"].tolist() == exact["other_label"].tolist()
    assert pairs["rank"].tolist() == list(range(1, len(pairs) + 1))
    assert exact["cosine"].tolist() == pytest.approx([1, 1], rel=1e-6)


def test_lists_are_those_of_the_table(finished, tmp_path):
    folder, path, _ = finished
    train, lists = pd.read_hdf(path, "train"), {}
    for kind in ("suspects", "drop", "select"):
        write_list(listed=tmp_path / "list.csv", scores=path, kind=kind, fraction=0.2, code="code")
        lists[kind] = pd.read_csv(tmp_path / "list.csv").set_index("id")
    harm = train.set_index("id")["harm"].sort_values(ascending=False, kind="stable")
    assert lists["suspects"].index.tolist() == harm.index.tolist()
    score = (train["help"].astype(float) - train["harm"]).set_axis(train["id"])
    assert lists["drop"].index.tolist() == score[score < 0].sort_values().index.tolist()
    top = pd.read_hdf(path, "top_influences", where="score > 0 & rank == 1")
    first = top["train_id"].drop_duplicates().tolist()
    assert len(lists["select"]) == 6
    assert lists["select"].index[: len(first)].tolist() == first[:6]
    features = folder / "features/c0/train.h5"
    with pytest.raises(ArtifactError, match="self_influence"):
        write_list(
            listed=tmp_path / "list.csv",
            scores=path,
            self_influence=[features],
            kind="suspects",
            code="code",
        )
