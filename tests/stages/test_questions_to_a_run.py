"""Questions to a finished run: the numbers of the workflow, and errors."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from few_words import write
from own_checkpoints import network
from pipeline import read_scores, run_config
from refused import refused
from report_page import Page
from reported import data_of
from workspace import REPOSITORY

import trak_core
from trak_core.command.ask import ask
from trak_core.command.main import main
from trak_core.config.read_config import read_config
from trak_core.queries.finished_run import FinishedRun
from trak_core.queries.open_run import OpenRun
from trak_core.queries.render_answers import answer_rows
from trak_core.runtime.files import matches
from trak_core.study.sample_columns import RESERVED

STUDY = (
    (REPOSITORY / "tests/studies/diabetes.py").read_text()
    + """

def train_columns():
    return {"clinic": [f"clinic {i % 3}" for i in range(342)]}


def encode(row, shift=0):
    return x[row] + shift, y[row]


def describe(sample):
    return f"progress {float(sample[-1]):.2f}"
"""
)
LINES = [{"row": 400, "shift": 0}, {"row": 350, "shift": 1}, {"row": 3, "shift": 0}]
CONFIG = {
    "study": "patients.py",
    "model_output": "regression",
    "checkpoints": {
        "early": {"path": "c0.pt", "run": "a", "at": 1},
        "late": {"path": "c1.pt", "run": "a", "at": 2},
        "other": {"path": "c2.pt", "run": "b", "at": 2},
    },
    "experiments": {"asked": {"data": "asked.jsonl"}, "few": {"targets": ["patient-342"]}},
    "projection": {"proj_dim": 16},
}
# Defaults for several checkpoints of one run are `unit_average` and `curvature`.
KINDS = {
    "projected": {"scoring": {"normalize": True}},
    "products": {
        "scoring": {"combine": "product_of_averages", "damping": 0.1},
        "features_dtype": "int8",
        "preconditioner": "adam",
        "projection": {"proj_dim": 16, "kind": "tensor_sketch"},
    },
    "exact": {"projection": "exact", "scoring": {"normalize": True}},
}


def save_checkpoints(folder):
    """Save three networks after a few steps, with the state of the optimizer."""
    for i in range(3):
        model = network(i)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 10)).square().mean().backward()
            optimizer.step()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / f"c{i}.pt")


def make_run(folder, **more):
    folder.mkdir(exist_ok=True)
    (folder / "patients.py").write_text(STUDY)
    write(folder / "asked.jsonl", LINES)
    save_checkpoints(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG | more))
    return run_config(folder / "mine.yaml")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cache(lambda kind: make_run(tmp_path_factory.mktemp(kind), **KINDS[kind]))


@pytest.fixture(scope="module", params=KINDS)
def run(request, made):
    return made(request.param)


@pytest.fixture(scope="module")
def projected(made):
    return made("projected")


@pytest.fixture
def here(projected, monkeypatch):
    monkeypatch.chdir(projected.parent)
    return projected


def close(answer, expected):
    """Return whether scores equal the expected ones, relative to the largest."""
    difference = np.abs(answer.scores.to_numpy() - expected.to_numpy()).max()
    return difference <= 1e-6 * np.abs(expected).max()


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_scores_equal_those_of_an_experiment(run):
    """For a line and for the sample, called from another folder than the run's."""
    before = written(run)
    results = trak_core.open(str(run))
    expected = read_scores(run / "scores/asked.h5")
    targets = pd.read_hdf(run / "scores/asked.h5", "targets")
    for number, line in enumerate(LINES):
        answer = results.ask(line)
        assert close(answer, expected[number])
        assert answer.scores.index.equals(expected.index)
        for key in ("label", "prediction", "output", "output_sd"):
            np.testing.assert_allclose(answer.target[key], targets[key][number], rtol=1e-5)
    assert close(results.ask(results.sample(0, "asked")), expected[0])
    x, y = results.sample(3)
    assert close(results.ask((x, y)), expected[2])
    few = read_scores(run / "scores/few.h5")
    assert close(results.ask(results.sample("patient-342", "few")), few["patient-342"])
    assert written(run) == before


def test_an_answer_has_the_columns_of_training_samples(projected):
    results = trak_core.open(str(projected))
    answer = results.ask({"row": 400}, k=3)
    expected = read_scores(projected / "scores/asked.h5")[0].sort_values(ascending=False)
    assert answer.top["train_id"].tolist() == [*expected.index[:3], *expected.index[-3:]]
    train = pd.read_hdf(projected / "scores/asked.h5", "train").set_index("id")
    for row in answer.top.to_dict("records"):
        np.testing.assert_allclose(row["output"], train["output"][row["train_id"]], rtol=1e-6)
        assert row["clinic"] == f"clinic {row['train_id'] % 3}"
        assert row["described_text"] == f"progress {row['label']:.2f}"
    assert answer.side(-1)["train_id"].tolist() == expected.index[::-1][:3].tolist()
    assert answer._repr_html_().count("<table") == 2
    assert answer._repr_html_().count('<td style="text-align: left">progress ') == 6
    words = {"function": "outputs.py:f", "label": "clinic"}  # the name of a column
    columns = replace(answer, model_output=words).side(1).columns
    assert {"label", "clinic"} <= {*columns}
    assert columns.is_unique
    assert {*answer_rows([answer])} - {"clinic"} <= RESERVED


def test_checkpoints_that_do_not_fit_are_read_for_each_call(run, reads):
    """The scores are the same, also if the gradients of the targets do not fit."""
    finished = FinishedRun.of_folder(run)
    is_exact = not finished.specs.is_projected
    # Three Gramians of 342 x 342 and their factors need 8 MiB, other checkpoints 100 KiB.
    finished.specs.config["compute"]["memory_mb"] = 10 if is_exact else 1
    results = OpenRun(run, finished)
    results.load()
    expected = read_scores(run / "scores/asked.h5")
    asked = [results.asked(line, i) for i, line in enumerate(LINES)]
    for (own, answer), number in zip(results.answers(asked), range(3), strict=True):
        assert own.id == number
        assert close(answer, expected[number])
    # load() stops at the first that does not fit. Held ones are released for the gradients.
    assert len(reads) == (4 if is_exact else 6)
    assert close(results.ask(LINES[0]), expected[0])
    assert len(reads) == (7 if is_exact else 9)


def test_samples_with_ids_of_several_types_are_scored_together(projected, reads):
    """One id occurs twice. A sample that cannot be scored does not stop the others."""
    results, expected = trak_core.open(str(projected)), read_scores(projected / "scores/asked.h5")
    asked = [results.asked(line, i) for i, line in enumerate(LINES)]
    wrong = replace(asked[0], sample=(torch.ones(3), torch.ones(1)))
    group = [replace(asked[0], id="x"), wrong, *asked, replace(asked[1], id="x")]
    answers = [answer for _, answer in results.answers(group)]
    assert answers[1].code == "gradients.model_call"
    for number, answer in zip((0, 0, 1, 2, 1), answers[:1] + answers[2:], strict=True):
        assert close(answer, expected[number])
    assert [answer.target["id"] for answer in answers[2:]] == [0, 1, 2, "x"]
    assert answers[0].scores.name == "x"
    assert len(reads) == 3


def test_each_line_has_an_answer_or_an_error(here, capsys):
    """A bad line does not stop the others. The table and the page have all answers."""
    lines = here.parent / "some.jsonl"
    deep = '{"row": ' + "[" * 100_000
    twice = '{"row": 400, "row": 3}'
    bad = [
        "no json for encode",
        '{"row": ',
        deep,
        '{"row": NaN}',
        twice,
        '{"row": 400, "col": 2}',
        '{"row": 9999}',
        '{"row": 400, "shift": 1e300}',  # it can be read, but not scored
    ]
    good = ['{"row": 400, "id": "x"}', "", '{"row": 350, "shift": 1}']
    again = '{"row": 3, "id": "x"}'
    lines.write_text("\n".join([good[0], *bad, again, *good[1:]]) + "\n")
    lines.write_bytes(lines.read_bytes() + b"\xff\n")
    before = written(here)
    words = ["ask", "mine.yaml", "--file", str(lines), "--csv", "out.csv", "--html", "out.html"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--top", "2"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert written(here) == before
    # Line numbers include empty lines, as in editors.
    lines_with_errors = re.findall(r"^Error: line (\d+): ", err, re.M)
    assert sorted(map(int, lines_with_errors)) == [*range(2, 11), 13]
    assert len(re.findall(r"^Error: ", err, re.M)) == 10
    assert "Found x again, which is the id of line 1." in err
    scores = read_scores(here / "scores/asked.h5")
    table = pd.read_csv("out.csv")
    assert table["target_id"].tolist() == ["x"] * 4 + ["10"] * 4
    assert table["rank"].tolist() == [1, 2, 1, 2] * 2
    for name, number in (("x", 0), ("10", 1)):
        rows = table[table["target_id"] == name]
        expected = scores[number].loc[rows["train_id"]]
        np.testing.assert_allclose(rows["score"], expected, rtol=1e-4, atol=1e-9)
        assert all(f"train {i} " in out for i in rows["train_id"])
    page = Page((here.parent / "out.html").read_text())
    assert [target["id"] for target in data_of(page)["targets"]] == ["x", "10"]
    assert "Without JavaScript, read the scores that trak ask prints" in page.text


def test_targets_are_given_by_id(here, capsys):
    main(["ask", "mine.yaml", "--target", "patient-342", "--target", "2", "--top", "1"])
    out, _ = capsys.readouterr()
    few = read_scores(here / "scores/few.h5")["patient-342"]
    assert f"  {few.max():+.3g}  train {few.idxmax()}" in out
    assert f"  {few.min():+.3g}  train {few.idxmin()}" in out
    asked = read_scores(here / "scores/asked.h5")[2]
    assert f"  {asked.max():+.3g}  train {asked.idxmax()}" in out
    with pytest.raises(SystemExit):
        main(["ask", "mine.yaml", "--target", "patient-1"])
    assert "Found patient-1. Targets have" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("same.jsonl", '{"row": 3, "id": 2}\n{"row": 3, "id": 1}\n'),
        ("same.json", '[\n{"row": 3, "id": 2},\n{"row": 3, "id": 1}\n]\n'),
    ],
)
def test_an_id_must_be_different_for_each_target_and_line(here, capsys, name, text):
    """Otherwise a page would mix the scores of two samples: command.id_again."""
    (here.parent / name).write_text(text)
    words = ["ask", "mine.yaml", "--target", "2", "--target", "2", "--file", name]
    with pytest.raises(SystemExit):
        main([*words, "--csv", "same.csv", "--top", "1"])
    assert pd.read_csv("same.csv")["target_id"].tolist() == [2, 2, 1, 1]
    assert capsys.readouterr().err.count("Found 2 again, which is the id of target 2.") == 2


def test_an_unfinished_or_changed_run_is_refused(tmp_path, monkeypatch):
    results = make_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with refused("config.no_record"):
        trak_core.open(str(tmp_path)).ask({"row": 3})

    def check():
        trak_core.open(str(results)).ask({"row": 3})

    check()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def change(name, old, new):
        path = tmp_path / name
        path.write_bytes(path.read_bytes().replace(old, new))

    def restore():
        for path, data in kept.items():
            path.write_bytes(data)

    change("patients.py", b"nn.Tanh()", b"nn.ReLU()")
    with refused("queries.changed", "study or data files"):
        check()
    with refused("queries.changed", "study or data files"):
        trak_core.open(str(results)).sample("patient-3")
    restore()
    (tmp_path / "c1.pt").write_bytes((tmp_path / "c2.pt").read_bytes())
    with refused("queries.changed", "checkpoint", "features/late/train.h5"):
        check()
    restore()
    change("mine.yaml", b"proj_dim: 16", b"proj_dim: 8")
    with pytest.raises(SystemExit, match="with another projection"):
        main(["ask", "mine.yaml", "--target", "patient-342"])
    restore()
    for key, value in (("damping", "3"), ("loss_weight_power", "0.25")):
        change("mine.yaml", b"study:", f"scoring: {{{key}: {value}}}\nstudy:".encode())
        with pytest.raises(SystemExit, match=rf"scores/\w+.h5 was computed with another {key}"):
            main(["ask", "mine.yaml", "--target", "patient-342"])
        restore()
    (results / "normal_matrix/other.h5").unlink()
    with refused("queries.not_finished", "other.h5"):
        check()
    (tmp_path / "c1.pt").unlink()
    with refused("queries.no_checkpoint", "c1.pt"):
        check()


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        (["--file", "none.jsonl"], "command.no_file", "none.jsonl"),
        (["--html", "results"], "command.no_output_folder", "results"),
        (["--csv", "a.x", "--html", "./a.x"], "command.output_of_run", "a.x"),
        (["--file", "asked.jsonl", "--csv", "linked.csv"], "command.output_of_run", "linked.csv"),
        (["--html", "linked.pt"], "command.output_of_run", "linked.pt"),
        (["--html", "results/answers.html"], "command.output_of_run", "results/answers.html"),
        (["--top", "0"], "command.top", "0"),
    ],
)
def test_arguments_that_are_refused(words, code, value, here):
    for link, file in (("linked.csv", "asked.jsonl"), ("linked.pt", "c0.pt")):
        if not Path(link).exists():
            Path(link).hardlink_to(file)
    before = written(here.parent)
    with refused(code, value):
        ask(["mine.yaml", *words])
    assert written(here.parent) == before


def test_an_output_must_not_match_a_pattern_of_data_files(here):
    for pattern, path, is_data in (
        ("*.jsonl", "new.jsonl", True),
        ("data", "data/new.csv", True),
        ("da*/**/*.csv", "data/a/b/new.csv", True),
        ("./*.jsonl", "new.csv", False),
        ("data/*.csv", "data/a/new.csv", False),
    ):
        assert matches(Path(path), pattern) == is_data
    config = Path("mine.yaml").read_text() + "\ndata_files: ['*.jsonl']\n"
    Path("more.yaml").write_text(config)
    with refused("command.output_of_run", "new.jsonl"):
        ask(["more.yaml", "--csv", "new.jsonl"])


def test_a_checkpoint_in_a_store_is_refused(here):
    schema = REPOSITORY / "workflow/schemas/config.schema.yaml"
    config = read_config(here.parent / "mine.yaml", schema)
    config["checkpoints"] = {"far": "s3://bucket/far.pt"}
    with refused("queries.no_checkpoint", "s3:/bucket/far.pt"):
        FinishedRun.of_config(config, here, here.parent)


def test_samples_that_are_refused(projected):
    results = trak_core.open(str(projected))
    with refused("queries.no_sample", 900):
        results.sample(900)
    with refused("queries.no_target", "patient-3"):
        results.sample("patient-3", "few")
    with refused("queries.no_experiment", "none", "asked, few"):
        results.sample(1, "none")
    with refused("study.failed", "unexpected keyword argument 'words'"):
        results.ask({"words": "some words"})
    with refused("queries.line"):
        results.ask('{"row": 3')
    with pytest.raises(ValueError, match=r"must be a tuple or a dict"):
        results.ask(json)
