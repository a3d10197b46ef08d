"""An experiment whose targets are described: decided by jobs, and again where these decide anew."""

import pandas as pd

SELECTING = {"compute_outputs": 3, "select_targets": 1}
SCORING = {"compute_features": 3, "compute_scores": 3, "average_scores": 1}


def test_targets_are_those_of_the_table_of_all(trained, tmp_path):
    study = trained.copy(tmp_path / "study")
    study.config["experiments"] = {
        "everything": {"targets": "all"},
        "errors": {"where": "prediction != label"},
    }
    counts = study.run("scores")
    twice = {rule: 2 * n for rule, n in SCORING.items()}
    assert counts == SELECTING | twice
    table = pd.read_hdf(study.path("results/scores/everything.h5"), "targets")
    errors = table.loc[table["prediction"] != table["label"], "id"].tolist()
    scores = pd.read_hdf(study.path("results/scores/errors.h5"), "scores")
    assert 1 < len(errors) < len(table)
    assert scores.columns.tolist() == errors
    study.config["experiments"]["errors"]["where"] = "prediction != label and label > 4"
    assert study.would_run("scores") == SCORING | {"select_targets": 1}
    # Another checkpoint says what is wrong anew.
    study.config["checkpoints"]["c1"] = {"seed": 11}
    again = study.run("scores")
    assert (again["train_checkpoint"], again["compute_outputs"]) == (1, 1)
    table = pd.read_hdf(study.path("results/scores/errors.h5"), "targets")
    expected = pd.read_hdf(study.path("results/scores/everything.h5"), "targets")
    expected = expected.query("prediction != label and label > 4")
    assert table["id"].tolist() == expected["id"].tolist()
