"""The page and the table of texts of an experiment show its samples and scores."""

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
import torch
from refused import refused
from report_page import Page
from reported import CODES, HOSTILE, ODD_TEXTS, check_alone, data_of, draw, study_with

from trak_core.artifacts import SELF_INFLUENCE, ArtifactError, create, verify
from trak_core.report.read_results import File, with_class_names
from trak_core.report.template_filters import number, signed
from trak_core.stages.draw_influences import draw_influences
from trak_core.study.show_samples import shown_tokens
from trak_core.study.study import Study


@pytest.fixture(params=CODES)
def shown(request, shown_as):
    return shown_as[request.param]


def test_the_same_scores_give_the_same_files(results, shown_as, tmp_path):
    study_file, files = shown_as["drawn"]
    for first, second in zip(files, draw(results, tmp_path, study_file), strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_an_answer_is_one_page_with_all_that_it_needs(shown):
    study_file, (answer, texts) = shown
    page = Page(answer.read_text())
    check_alone(page)
    assert "not shown here" not in page.text
    assert 'pandas.read_hdf("scores/mine.h5", "top_influences")' in page.text
    draws, describes = (f"def {name}(" in study_file.read_text() for name in ("draw", "describe"))
    data = data_of(page)
    samples = [entry["sample"] for entry in (*data["targets"], *data["train"])]
    assert all(isinstance(sample, list) is draws for sample in samples)
    assert all(sample[0].startswith("data:image/png;base64,") for sample in samples if draws)
    # With `describe` the table has more training samples than the page.
    targets, train = (pd.read_hdf(texts, key)["text"].tolist() for key in ("targets", "train"))
    assert describes or all(text.startswith("[") for text in targets + train)
    on_page = [] if draws else targets if describes else targets + train
    shown_texts = {" ".join(sample.split()) for sample in samples if not draws}
    assert set(on_page) <= shown_texts


def test_the_data_of_a_page_are_the_scores(results, shown_as):
    page = Page(shown_as["drawn"][1][0].read_text())
    data = data_of(page)
    assert not set("<>&\u2028\u2029") & set(page.data[0])
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    train = pd.read_hdf(results / "scores/mine.h5", "train").set_index("id")
    assert [target["id"] for target in data["targets"]] == [*HOSTILE, "plain"]
    for target in data["targets"]:
        mine = top[(top.target_id == target["id"]) & (top["rank"] <= 10)]
        ordered = mine.sort_values(["sign", "rank"], ascending=[False, True])
        expected = [(row.train_id, signed(row.score)) for row in ordered.itertuples()]
        shown = [(data["train"][row]["id"], score) for row, score in target["influences"]]
        assert shown == expected
    for entry in data["train"]:
        assert entry["harm"] == number(train.harm[entry["id"]], 2)
        assert entry["anchor"] == quote(entry["id"], safe="")
    # The page has all influential samples and all harmful ones.
    assert {e["id"] for e in data["train"]} == {*top.train_id} | {*train.index[train.harm > 0]}


def test_a_page_has_the_self_influence_from_its_file(results, tmp_path):
    ids = pd.read_hdf(results / "scores/mine.h5", "train")["id"].tolist()
    files = {"answer": "mine.html", "texts": "mine.h5"}
    inputs = {key: tmp_path / name for key, name in files.items()}
    inputs |= {"scores": results / "scores/mine.h5", "study_file": study_with(tmp_path, "")}
    own = pd.DataFrame({"id": ids, "self_influence": np.arange(20) / 8})
    for name, rows in (("whole", own), ("short", own[:-1])):
        with create(tmp_path / f"{name}.h5", SELF_INFLUENCE, {}, {}) as writer:
            writer.table("train", rows, [])
    draw_influences(**inputs, self_influence=[tmp_path / "whole.h5"], code="code")
    data = data_of(Page(inputs["answer"].read_text()))
    known = {entry["id"]: entry["self-influence"] for entry in data["train"]}
    assert known == {i: number(ids.index(i) / 8, 2) for i in known}
    with pytest.raises(ArtifactError, match="training samples"):
        draw_influences(**inputs, self_influence=[tmp_path / "short.h5"], code="code")


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ({"input_ids": torch.tensor([[7, 8, 9]])}, [7, 8]),
        ({"input_ids": [7, 8, 9]}, [7, 8]),
        ({"input_ids": [7]}, [1, 2]),  # The tokens are those of the text to be written.
        ({"tokens": torch.tensor([7, 8])}, [1, 2]),
        ((torch.tensor([7, 8]), torch.tensor([7, 8])), [1, 2]),
    ],
)
def test_tokens_without_texts_are_numbers(sample, expected):
    study = Study(Path("study.py"), ModuleType("study"))
    assert shown_tokens(study, 0, sample, 2) == [f"{number} " for number in expected]


@pytest.mark.parametrize("given", ["['a']", "[1, 2]"])
def test_there_must_be_a_text_for_each_token(tmp_path, given):
    study = Study.load(study_with(tmp_path, f"\ndef token_texts(sample):\n    return {given}\n"))
    with refused("study.token_texts", "2 tokens", "sample 7", "int" if "1" in given else "1"):
        study.token_texts(7, None, 2)


@pytest.mark.parametrize(("names", "value"), [(["cat", 3], "3"), (["cat", "cat"], "'cat', 2")])
def test_names_of_classes_are_different_texts(tmp_path, names, value):
    (tmp_path / "named.py").write_text(f"def class_names():\n    return {names}\n")
    with refused("study.class_names", tmp_path / "named.py", value):
        Study.load(tmp_path / "named.py").class_names()


def test_classes_are_shown_by_their_names():
    """A column of the study may have the name of a column of groups."""
    columns = {"label": [0, 1], "prediction": [1, 2], "column": "label", "group": [5, 6]}
    tables = {"targets": pd.DataFrame(columns)}
    scores = File("", "", {}, {"model_output": "image_classification"}, tables)
    named = with_class_names(scores, ["cat", "dog"]).tables["targets"]
    expected = {"label": ["cat", "dog"], "prediction": ["dog", 2], "group": [5, 6]}
    assert named[[*expected]].to_dict("list") == expected
    groups = pd.DataFrame({"column": ["label", "site"], "group": ["1", "1"]})
    named = with_class_names(replace(scores, tables={"groups": groups}), ["cat", "dog"])
    assert named.tables["groups"]["group"].tolist() == ["dog", "1"]
    regression = replace(scores, spec={"model_output": "regression"})
    for file, names in ((scores, []), (regression, ["cat", "dog"])):
        assert with_class_names(file, names) is file


def test_odd_texts_are_shown_unchanged(results, shown_as):
    study_file, (answer, texts) = shown_as["described"]
    study = Study.load(study_file)
    markup = answer.read_text()
    page = Page(markup)
    assert len(page.scripts) == len(page.data) == 1
    # The page has longer texts than the table.
    data = data_of(page)
    on_page = {" ".join(entry["sample"].split()) for entry in (*data["targets"], *data["train"])}
    assert "W" * 667 + " ... " + "W" * 333 in on_page
    verify(texts)
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    train = pd.read_hdf(texts, "train")
    assert set(train["id"]) == set(top["train_id"])
    expected = ODD_TEXTS | {"": ""}
    split = study.split("train", None)
    for sample_id, text in zip(train["id"], train["text"], strict=True):
        sample = split.samples[split.ids.index(sample_id)]
        assert text == expected[study.describe(sample_id, sample)]
        assert (text or "(an empty text)") in on_page or text.startswith("W")
    targets = pd.read_hdf(texts, "targets", where='id == "plain"')
    assert targets["text"].tolist() == [expected[list(ODD_TEXTS)[23 % len(ODD_TEXTS)]]]


def test_a_wrong_result_of_describe_names_the_sample(results, tmp_path):
    study = study_with(tmp_path, "\ndef describe(sample):\n    return None\n")
    with refused("study.text_type", re.compile(r"describe\(\).* NoneType for sample")):
        draw(results, tmp_path, study)
    assert not (tmp_path / "mine.html").exists()
