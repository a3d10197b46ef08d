"""An experiment's figure, answer and texts show the samples as the report does."""

import hashlib
import io
import json
import re
import shutil
import subprocess
from base64 import b64encode
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from report_page import Page
from reported import DESCRIBE, DRAW, HOSTILE, ODD_TEXTS, check_alone, study_with

from trak_core.artifacts import verify
from trak_core.errors import InputError
from trak_core.report.charts import influences_figure
from trak_core.report.describe_samples import EACH, find_examples
from trak_core.report.number_formats import signed
from trak_core.report.read import read_experiment
from trak_core.report.render import answer as rendered_answer
from trak_core.stages.draw_influences import draw_influences
from trak_core.study.study import Study

CHROMIUM = shutil.which("chromium")
# What the study's functions are, by how it shows samples.
CODES = {"printed": "", "drawn": DRAW + DESCRIBE, "described": DESCRIBE}


def draw(results, folder, study_file):
    """What the job writes: figure, page and table."""
    names = {"figure": "mine.png", "answer": "mine.html", "texts": "mine.h5"}
    files = {key: folder / name for key, name in names.items()}
    inputs = {"scores": results / "scores/mine.h5", "study_file": study_file, "code": "code"}
    draw_influences(**files, **inputs)
    return list(files.values())


@pytest.fixture(scope="module")
def shown_as(results, tmp_path_factory):
    """The study that shows samples in a way, and the files drawn of it."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CODES}
    studies = {name: study_with(folder, CODES[name]) for name, folder in folders.items()}
    return {name: (path, draw(results, path.parent, path)) for name, path in studies.items()}


@pytest.fixture(params=CODES)
def shown(request, shown_as):
    return shown_as[request.param]


def unspaced(text):
    """Text as it is before lines are broken."""
    return "".join(text.split())


def test_a_figure_shows_what_the_page_shows(results, shown):
    experiment = read_experiment(results / "scores/mine.h5", results, 4, EACH)
    study = Study.load(shown[0])
    splits = study.split("train", None), [study.split("mine", [*HOSTILE, "plain"])]
    (examples,) = find_examples(study, [experiment], *splits)
    tiles = np.reshape(influences_figure(examples).axes, (4, 1 + 2 * EACH))
    for row, about in zip(tiles, examples.shown, strict=True):
        expected = [(f"target {about.id}", "predicted", examples.targets[about.id])]
        for sign in (1, -1):
            best = [(s.train_id, s.score) for s in examples.strongest(about.id, sign)]
            expected += [(f"train {i}", signed(score), examples.train[i]) for i, score in best]
            expected += [None] * (EACH - len(best))
        for axes, tile in zip(row, expected, strict=True):
            assert axes.axison is (tile is not None)
            if tile is None:
                continue
            title, more, sample = tile
            above = unspaced(axes.get_title())
            assert above.startswith(f"{unspaced(title)}label")
            assert above.endswith(more) or (more == "predicted" and more in above)
            if isinstance(sample, str):
                # What fits into a tile.
                begin, _, cut = unspaced(axes.texts[0].get_text()).rpartition("...")
                assert unspaced(sample).startswith(begin) if begin else cut == unspaced(sample)
            else:
                pixels = imread(io.BytesIO(sample.data), format=sample.kind)
                assert np.array_equal(axes.images[0].get_array(), pixels)


def test_the_same_scores_give_the_same_files(results, shown, tmp_path):
    study_file, files = shown
    for first, second in zip(files, draw(results, tmp_path, study_file), strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert imread(files[0], format="png").ndim == 3


def test_text_of_users_is_no_formula(results, tmp_path):
    study = study_with(tmp_path, "\nx_data = ['$x^{$'] * 24\n")
    text = study.read_text()
    for rows in ("[:20]", "[20:]"):
        text = text.replace(f"TensorDataset(x{rows}, y{rows})", f"list(zip(x_data{rows}, y{rows}))")
    study.write_text(text)
    figure, *_ = draw(results, tmp_path, study)
    assert figure.stat().st_size > 0


def test_an_answer_is_one_page_with_all_that_it_needs(results, shown):
    study_file, (_, answer, texts) = shown
    page = Page(answer.read_text())
    check_alone(page)
    assert "Experiment mine: which training examples made these predictions?" in page.text
    assert "Which of 20 training examples pushed the prediction of 4 targets up" in page.text
    assert "projection rademacher, to 8 numbers; damping 0.5" in page.text
    assert "not shown here" not in page.text
    draws, describes = (f"def {name}(" in study_file.read_text() for name in ("draw", "describe"))
    assert (len(page.all("img")) > 4) is draws
    scores = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    for target, mine in scores.groupby("target_id"):
        about = page.text[page.text.index(f"target {target} label") :].partition("target ")[2]
        block = about.split("target ", 1)[0]
        # Pictures take room, so that there are fewer.
        kept = mine[mine["rank"] <= (EACH if draws else 10)]
        for row in kept.itertuples():
            assert signed(row.score) in block
            assert f"train {row.train_id} label" in block
    # With describe the table has all training samples that the scores name, the page fewer.
    targets, train = (pd.read_hdf(texts, key)["text"].tolist() for key in ("targets", "train"))
    assert describes or all(text.startswith("[") for text in targets + train)
    on_page = targets if describes else targets + train
    assert [text for text in on_page if text not in page.text] == []


def links(page, entry, stop):
    """Where the links lead that stand between the heading with this id and the next with such."""
    where = [i for i, (_, a) in enumerate(page.elements) if a.get("id") == entry]
    (start,) = where
    after = page.elements[start + 1 :]
    ends = [i for i, (_, a) in enumerate(after) if a.get("id", "").startswith(stop)]
    found = (a["href"] for name, a in after[: min(ends, default=len(after))] if name == "a")
    return [unquote(href[1:]) for href in found if href != f"#{entry}"]


def test_samples_and_targets_lead_to_each_other(results, shown):
    study_file, (_, answer, _) = shown
    page = Page(answer.read_text())
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    top = top[top["rank"] <= (EACH if "def draw(" in study_file.read_text() else 10)]
    places = {a["id"] for _, a in page.elements if "id" in a}
    assert len({place for place in places if place.startswith("train-")}) == top.train_id.nunique()
    for target, mine in top.groupby("target_id"):
        found = links(page, f"target-{quote(target, safe='')}", ("target-", "pushed"))
        assert found == [
            f"train-{i}"
            for i in mine.sort_values(["sign", "rank"], ascending=[False, True]).train_id
        ]
    for sample, mine in top.groupby("train_id"):
        found = links(page, f"train-{quote(sample, safe='')}", "train-")
        strongest_first = mine.iloc[mine.score.abs().argsort(kind="stable")[::-1]]
        up, down = (strongest_first[strongest_first.sign == sign].target_id for sign in (1, -1))
        assert found == [f"target-{i}" for i in (*up, *down)]
        entry = page.text.rpartition(f"train {sample} label ")[2]
        assert all(
            f"target {row.target_id} {signed(row.score)}" in entry for row in mine.itertuples()
        )


def test_the_script_holds_nothing_of_a_study(shown_as):
    pages = [Page(answer.read_text()) for _, (_, answer, _) in shown_as.values()]
    (script,) = {page.scripts[0] for page in pages}
    # What it looks at is there, and hidden from whoever runs no script.
    for page in pages:
        assert next(a for a in page.all("div") if "find" in a.get("class", ""))["hidden"] is None
        assert [a["type"] for a in page.all("input")] == ["search"]  # a regression is never wrong
        assert all("hidden" not in a for _, a in page.elements if a.get("class") == "target")
        classes = {name for _, a in page.elements for name in a.get("class", "").split()}
        assert {"find", "target", "name"} <= classes
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|Function", script
    )


# Types each query, then follows a link to a hidden target; says what a reader sees.
PROBE = """
const seen = () => [...document.querySelectorAll(".target")].map((target) => !target.hidden);
const box = document.querySelector("input[type=search]");
const type = (query) => {
  box.value = query;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  return seen();
};
addEventListener("load", () => setTimeout(() => {
  const found = [document.querySelector(".find").checkVisibility(), QUERIES.map(type)];
  location.hash = [...document.querySelectorAll("h3[id^=target-] a")].at(0).hash;
  setTimeout(() => {
    document.body.textContent = JSON.stringify([...found, seen(), box.value]);
  }, 100);
}, 100));
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
def test_a_browser_hides_what_is_not_searched_for(results, shown_as, tmp_path):
    _, (_, answer, _) = shown_as["described"]
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    targets = pd.read_hdf(results / "scores/mine.h5", "targets")["id"].tolist()
    beside = {target: set(top[top.target_id == target].train_id) for target in targets}
    queries = {
        "": targets,
        "onerror=ALERT(2)": [HOSTILE[1]],
        "nowhere plain": [],
        "\uff50lain target": ["plain"],  # a wide p
        "<script>alert(0)": [t for t in targets if "<script>alert(0)</script>" in beside[t]],
        "9": [t for t in targets if "row-9" in beside[t]],  # and not row-19
        "no such text": [],
    }
    probe = PROBE.replace("QUERIES", json.dumps(list(queries)))
    allowed = b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    page = tmp_path / "page.html"
    # The page's own policy holds, except that it knows the probe as well.
    markup = answer.read_text().replace("script-src ", f"script-src 'sha256-{allowed}' ")
    page.write_text(markup.replace("</body>", f"<script>{probe}</script></body>"))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000")
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", str(page)]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    is_there, found, followed, left = json.loads(Page(dumped).text[Page(dumped).text.index("[") :])
    assert is_there
    assert found == [[target in expected for target in targets] for expected in queries.values()]
    assert followed == [True] * len(targets)
    assert left == ""


def test_wrong_predictions_are_marked(shown_as, results):
    study = Study.load(shown_as["described"][0])
    experiment = read_experiment(results / "scores/mine.h5", results, 4, EACH)
    experiment.tables["shown"]["prediction"] = [1, 2, 3, 4]
    experiment.tables["shown"]["label"] = [1, 0, 3, 0]
    experiment = replace(experiment, spec=experiment.spec | {"model_output": "text_classification"})
    split = study.split("mine", [*HOSTILE, "plain"])
    (examples,) = find_examples(study, [experiment], study.split("train", None), [split])
    page = Page(rendered_answer(examples, "study.py", EACH))
    check_alone(page)
    marked = ["data-wrong" in a for _, a in page.elements if "target" in a.get("class", "").split()]
    assert marked == [False, True, False, True]
    assert [a["type"] for a in page.all("input")] == ["search", "checkbox"]


def test_odd_texts_are_read_as_they_are(results, shown_as):
    study_file, (_, answer, texts) = shown_as["described"]
    study = Study.load(study_file)
    markup = answer.read_text()
    page = Page(markup)
    assert markup.count("<script") == len(page.scripts) == 1
    # Whole lines and longer texts than in the table.
    assert "W" * 1000 + " ..." in page.text
    words = [a for name, a in page.elements if name == "span" and a.get("class") == "words"]
    assert all(a["dir"] == "auto" for a in words)
    verify(texts)
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    train = pd.read_hdf(texts, "train")
    assert set(train["id"]) == set(top["train_id"])
    expected = ODD_TEXTS | {"": ""}
    split = study.split("train", None)
    for sample_id, text in zip(train["id"], train["text"], strict=True):
        sample = split.samples[split.ids.index(sample_id)]
        assert text == expected[study.describe(sample_id, sample)]
        assert (text or "(an empty text)") in page.text or text.startswith("W")
    targets = pd.read_hdf(texts, "targets", where='id == "plain"')
    assert targets["text"].tolist() == [expected[list(ODD_TEXTS)[23 % len(ODD_TEXTS)]]]


def test_targets_left_out_of_an_answer_are_said_to_be(results, tmp_path, monkeypatch):
    monkeypatch.setattr("trak_core.report.describe_samples._TARGETS", 1)
    _, answer, texts = draw(results, tmp_path, study_with(tmp_path, DESCRIBE))
    page = Page(answer.read_text())
    assert "3 more targets are not shown here: scores/mine.h5" in page.text
    assert page.text.count("Most helpful") == 1
    assert len(pd.read_hdf(texts, "targets")) == 4


def test_a_describe_that_fails_later_names_the_sample(results, tmp_path):
    study = study_with(tmp_path, "\ndef describe(sample):\n    return None\n")
    with pytest.raises(InputError, match=r"describe\(\) must return a str, .* NoneType for sample"):
        draw(results, tmp_path, study)
    assert not (tmp_path / "mine.png").exists()
