"""The page and the table of texts of an experiment show its scores and its samples.

Samples are shown as pictures that a study draws, as images, or as printed numbers.
"""

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.pyplot import imread
from refused import refused
from report_page import Page
from reported import CODES, HOSTILE, ODD_TEXTS, check_alone, data_of, draw, study_with

from trak_core.artifacts import SELF_INFLUENCE, ArtifactError, create, verify
from trak_core.report.describe_samples import find_examples
from trak_core.report.read_results import File, with_class_names
from trak_core.report.template_filters import number, signed
from trak_core.stages.draw_influences import draw_influences
from trak_core.study.dataset_split import Split
from trak_core.study.show_samples import are_drawn, printed, shown_tokens
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


def decoded(picture):
    head, _, data = picture.src.partition(";base64,")
    kind = head.removeprefix("data:image/")
    pixels = imread(io.BytesIO(base64.b64decode(data)), format=kind)
    return kind, np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ((torch.tensor([1.5, 2.0]), torch.tensor(3)), "[1.5, 2]"),
        ((torch.arange(20), torch.tensor(3)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...] (20)"),
        ((torch.zeros(1, 2), [1, 2], 0), "[0, 0] (1 x 2); [1, 2]"),
        ({"input_ids": torch.tensor([101, 7]), "labels": 1}, "input_ids: [101, 7]; labels: 1"),
        ((2.25,), "2.25"),
    ],
)
def test_samples_that_are_not_drawn_are_printed(sample, text):
    assert printed(sample) == text


def shown_without_draw(folder, samples):
    """Return whether samples of a study without `draw` are drawn, and how they are shown."""
    path = folder / "study.py"
    path.write_text("")
    study, split = Study.load(path), Split(samples, list(range(len(samples))))
    top = pd.DataFrame({"train_id": split.ids})
    file = File("", "", {}, {}, {"shown": top.head(0), "top_influences": top}, {})
    (examples,) = find_examples(study, [file], split, [split])
    assert examples.drawn is are_drawn(study, split)
    return examples.drawn, list(examples.train.values())


def test_images_are_drawn_without_draw(tmp_path):
    shades = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    color = torch.stack([shades, shades.T, 1 - shades])
    broken = torch.tensor([[-2.0, 2.0], [torch.nan, torch.inf]])
    samples = [
        (shades[None], 1),
        {"pixel_values": color, "labels": 1},
        ((255 * shades[None]).round().byte(), 1),
        (4 * shades[None] - 2, 1),
        (broken[None], 1),
        ((6e38 * shades.double() - 3e38).float()[None], 1),
    ]
    is_drawn, pictures = shown_without_draw(tmp_path, samples)
    assert is_drawn
    grey = shades[..., None].expand(2, 2, 3)
    clean = torch.tensor([[0.0, 1.0], [0.0, 1.0]])[..., None].expand(2, 2, 3)
    expected = [grey, color.movedim(0, -1), grey, grey, clean, grey]
    for picture, image in zip(pictures, expected, strict=True):
        _, pixels = decoded(picture)
        height, width = pixels.shape[:2]
        middles = pixels[height // 4 :: height // 2, width // 4 :: width // 2, :3][:2, :2]
        assert np.abs(middles - image.numpy()).max() < 0.01


@pytest.mark.parametrize(
    "sample",
    [
        (torch.zeros(4, 4), 1),
        (torch.zeros(2, 4, 4), 1),
        (torch.zeros(1, 3, 4, 4), 1),
        (torch.zeros(3, 4, 4, dtype=torch.int64), 1),
        (torch.zeros(3, 0, 4), 1),
        (torch.zeros(3, 4, 4), torch.zeros(3, 4, 4), 1),
    ],
)
def test_other_tensors_are_printed(sample, tmp_path):
    assert shown_without_draw(tmp_path, [sample]) == (False, [printed(sample)])
