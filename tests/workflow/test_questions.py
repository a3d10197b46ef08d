"""Experiments with targets in a file or by a description: which jobs run, and with what result."""

import numpy as np
import pandas as pd
import pytest
from few_words import write

STUDY = """

def encode(row):
    return x[int(row)], y[int(row)]  # cells of a table are texts


def describe(sample):
    return f"progress {float(sample[1]):.2f}"
"""
QUESTION = """
from diabetes import x, y
from torch.utils.data import TensorDataset

def target_data():
    return TensorDataset(x[400:402], y[400:402])

def target_ids():
    return ["first", "second"]
"""
# Per checkpoint: the question's gradient and its scores; then the average.
ONE = {"compute_features": 3, "compute_scores": 3, "average_scores": 1}


@pytest.fixture
def study(own, tmp_path):
    study = own.copy(tmp_path / "study")
    path = study.path("diabetes.py")
    path.write_text(path.read_text() + STUDY)
    return study


def test_a_question_costs_its_own_gradient_and_scores(study):
    """Scores of samples that are also targets of the study are equal to the study's."""
    study.run("scores")  # again, because the study has new functions
    names = list(study.config["experiments"]["few"]["targets"])
    lines = [{"row": int(name.removeprefix("patient-")), "id": name} for name in names]
    write(study.path("asked.jsonl"), lines)
    kept = {name: b for name, b in study.artifacts().items() if "train.h5" in name}
    question = 'experiments={"asked": {"data": "asked.jsonl"}}'
    ran = study.run("results/answers/asked.html", "--config", question)
    assert ran == {**ONE, "draw_influences": 1}
    assert {name: study.artifacts()[name] for name in kept} == kept
    asked, own = (
        pd.read_hdf(study.path(f"results/scores/{name}.h5"), "scores") for name in ("asked", "few")
    )
    assert list(asked.columns) == names
    np.testing.assert_array_equal(asked.to_numpy(), own.to_numpy())
    assert "progress " in study.path("results/answers/asked.html").read_text()
    # Another question under the same name is another experiment's.
    write(study.path("asked.jsonl"), [{"row": 341}])
    assert study.would_run("results/scores/asked.h5", "--config", question) == ONE


def test_questions_in_python_and_in_a_table(study):
    study.path("asked.py").write_text(QUESTION.replace("from diabetes", "from beside_it"))
    study.path("beside_it.py").write_text("from diabetes import x, y")
    lines = [{"row": 400, "id": "first"}, {"row": 401, "id": "second"}]
    write(study.path("asked.jsonl"), lines)
    pd.DataFrame(lines).to_csv(study.path("asked.tsv"), sep="\t", index=False)
    study.config["experiments"] |= {
        "code": {"data": "asked.py"},
        "lines": {"data": "asked.jsonl", "targets": ["second"]},
        "table": {"data": "asked.tsv"},
        "row": {"data": "asked.tsv", "targets": ["second"]},
    }
    scores = [f"results/scores/{name}.h5" for name in ("code", "lines", "table", "row")]
    of_training = {"compute_features": 3 + 4 * 3, "compute_normal_matrix": 3}
    assert study.run(*scores) == {rule: 4 * n for rule, n in ONE.items()} | of_training
    code, rows, table, row = (pd.read_hdf(study.path(path), "scores") for path in scores)
    assert list(code.columns) == list(table.columns) == ["first", "second"]
    np.testing.assert_allclose(code, table, rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(rows["second"], row["second"])
    # Some processors sum products of a batch of one sample in another order.
    allowed = 1e-6 * table["second"].abs().max()
    np.testing.assert_allclose(rows["second"], table["second"], rtol=0, atol=allowed)
    # A change of the file reruns only its experiment.
    question = QUESTION.replace("402", "403").replace('"second"', '"b", "c"')
    study.path("asked.py").write_text(question)
    assert study.would_run(*scores) == ONE


def test_described_targets_are_those_of_the_table_of_all(trained, tmp_path):
    """Jobs decide which these are, and again where other checkpoints could decide anew."""
    study = trained.copy(tmp_path / "study")
    study.config["experiments"] = {
        "everything": {"targets": "all"},
        "errors": {"where": "prediction != label"},
    }
    counts = study.run("scores")
    twice = {rule: 2 * n for rule, n in ONE.items()}
    assert counts == {"compute_outputs": 3, "select_targets": 1} | twice
    table = pd.read_hdf(study.path("results/scores/everything.h5"), "targets")
    errors = table.loc[table["prediction"] != table["label"], "id"].tolist()
    scores = pd.read_hdf(study.path("results/scores/errors.h5"), "scores")
    assert 1 < len(errors) < len(table)
    assert scores.columns.tolist() == errors
    study.config["experiments"]["errors"]["where"] = "prediction != label and label > 4"
    assert study.would_run("scores") == ONE | {"select_targets": 1}
    # Another checkpoint says what is wrong anew.
    study.config["checkpoints"]["c1"] = {"seed": 11}
    again = study.run("scores")
    assert (again["train_checkpoint"], again["compute_outputs"]) == (1, 1)
    table = pd.read_hdf(study.path("results/scores/errors.h5"), "targets")
    expected = pd.read_hdf(study.path("results/scores/everything.h5"), "targets")
    expected = expected.query("prediction != label and label > 4")
    assert table["id"].tolist() == expected["id"].tolist()
