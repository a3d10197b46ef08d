"""The report is one page that needs nothing beside it and says what the artifacts hold."""

import base64
import hashlib
import io
import re
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.pyplot import imread
from report_page import Page
from reported import (
    DESCRIBE,
    DRAW,
    HOSTILE,
    ODD_TEXTS,
    STUDY,
    check_alone,
    config_of,
    finished,
    write,
)

from trak_core.artifacts import ArtifactError
from trak_core.report.examples import EACH
from trak_core.report.numbers import number


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def markup(results):
    return write(results)


@pytest.fixture(scope="module")
def page(markup):
    return Page(markup)


def test_the_page_needs_nothing_and_runs_nothing(page):
    check_alone(page)
    policy = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_texts_of_users_show_as_they_are(page, markup, results):
    for text in (*HOSTILE, "<script>alert(0)</script>", "<u>c0</u>.pt"):
        assert text in page.text
    assert config_of(results)["study"] in page.text
    assert "<script" not in markup
    assert "onerror=alert(2)>" not in markup.replace("onerror=alert(2)&gt;", "")


def test_a_first_report_says_what_is_still_measured(results, page):
    asked = {"evaluation": {"subsets": {"count": 20, "seeds": 2}}, "distortion": {}}
    first = Page(write(results, asked=asked))
    check_alone(first)
    assert "The first report, from scores alone" in first.text
    assert "It is not measured yet." in first.text
    assert first.text.count("follows in report.html") == 3
    assert "These errors are not measured yet" in first.text
    assert "has no evaluation:" not in first.text
    assert "first report" not in page.text
    assert "has no evaluation:" in page.text


def test_the_same_artifacts_give_the_same_bytes(results, markup):
    assert write(results) == markup


def test_examples_are_the_strongest_of_each_target(page, results):
    scores = pd.read_hdf(results / "scores/mine.h5", "scores")
    for target in scores.columns:
        mine = scores[target].sort_values(ascending=False, kind="stable")
        begin = page.text.index(f"target {target} label")
        block = page.text[begin:].split("target ", 2)[1]
        shown = re.findall(r"train (\S+) label", block)
        helpful = mine[mine > 0].index[:EACH].tolist()
        harmful = mine[mine < 0].index[::-1][:EACH].tolist()
        assert shown == helpful + harmful


def test_the_worked_example_is_of_this_study(page, results):
    scores = pd.read_hdf(results / "scores/mine.h5", "scores")[HOSTILE[0]]
    up, down = scores.max(), scores.min()
    example = page.text[page.text.index("Example.") :]
    assert f"Training sample {scores.idxmax()} has its largest score, +{number(up, 2)}" in example
    assert f"Sample {scores.idxmin()} has the lowest, {number(down, 2)}" in example
    assert f"counts {number(max(abs(up / down), abs(down / up)), 2)} times as much" in example


def test_printed_samples_stand_apart_from_labels(page):
    prints = [a for n, a in page.elements if n == "span" and a.get("class") == "mono"]
    assert len(prints) > 4
    assert re.search(r"label \S+ \[", page.text)
    assert not re.search(r"\d\[", page.text)


def test_trust_that_was_not_measured_is_said_to_be_so(page):
    assert "It was not measured." in page.text
    assert "add evaluation: to the config" in page.text


def test_condition_numbers_are_those_of_the_matrices(page, results):
    for name in ("c0", "c1"):
        path = results / f"normal_matrix/{name}.h5"
        matrix = pd.read_hdf(path, "normal_matrix").to_numpy()
        with h5py.File(path) as file:
            added = 0.5 * file["mean_squared_norm"][()] * np.eye(len(matrix))
        damped, plain, *_ = page.row(name)
        assert damped == number(np.linalg.cond(matrix + added))
        assert plain == number(np.linalg.cond(matrix))


def test_hashes_and_versions_are_those_of_the_files(page, results):
    for name in ("scores/mine.h5", "normal_matrix/c0.h5"):
        with h5py.File(results / name) as file:
            assert page.row(name)[0] == file.attrs["content-hash"].decode()
    assert page.row("torch") == [torch.__version__]
    assert page.row("numpy") == [np.__version__]
    checkpoints = results.parent / "c1.pt"
    assert hashlib.sha256(checkpoints.read_bytes()).hexdigest() in page.text


def test_exact_scores_have_no_matrices_to_show(results, page):
    exact = Page(write(results.parent / "exact", exact=True))
    check_alone(exact)
    assert "Nothing was projected" in exact.text
    assert "Condition numbers" not in exact.text
    assert "Condition numbers" in page.text


def test_a_study_that_draws_has_pictures(results, tmp_path):
    study = tmp_path / "drawn.py"
    study.write_text(STUDY.replace("HOSTILE", repr(HOSTILE)) + DRAW)
    page = Page(write(results, study=study))
    check_alone(page)
    pictures = [i for i in page.all("img") if i["alt"].startswith(("target ", "training "))]
    assert "target " + HOSTILE[1] in [picture["alt"] for picture in pictures]
    assert len(pictures) > 4
    for picture in pictures:
        kind, data = re.fullmatch(r"data:image/(\w+);base64,(.*)", picture["src"]).groups()
        assert imread(io.BytesIO(base64.b64decode(data)), format=kind).ndim == 3


def test_a_study_that_describes_has_texts(results, tmp_path):
    study = tmp_path / "described.py"
    study.write_text(STUDY.replace("HOSTILE", repr(HOSTILE)) + DESCRIBE)
    markup = write(results, study=study)
    assert "<script" not in markup
    page = Page(markup)
    check_alone(page)
    shown = [i for i, (name, a) in enumerate(page.elements) if a.get("class") == "words"]
    assert len(shown) > 4
    found = [text for text in ODD_TEXTS.values() if text in page.text]
    assert len(found) > len(ODD_TEXTS) / 2
    assert "W" * 201 not in page.text
    assert not re.search(r"label \S+ \[\S+, ", page.text)


def test_scores_of_an_earlier_version_are_refused(results, tmp_path):
    old = Path(__file__).parents[1] / "data/artifacts/1/scores.h5"
    folder = tmp_path / "results/scores"
    folder.mkdir(parents=True)
    (folder / "mine.h5").write_bytes(old.read_bytes())
    with pytest.raises(ArtifactError, match=r"mine\.h5: .*'targets'.*rule average_scores"):
        write(tmp_path / "results")


def test_targets_left_out_are_said_to_be(results, monkeypatch):
    monkeypatch.setattr("trak_core.report.examples._TARGETS", 1)
    page = Page(write(results))
    check_alone(page)
    assert "3 targets more not shown here: scores/mine.h5 has the scores of all" in page.text
    assert page.text.count("Most helpful") == 1
