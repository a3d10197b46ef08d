"""The page of an experiment: its script in a browser, and the limit of its size."""

import json
import re
from dataclasses import replace
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
import torch
from in_browser import CHROMIUM, in_browser
from report_page import Page
from reported import CODES, DESCRIBE, HOSTILE, check_alone, data_of, study_with
from reported import write as report_of

from trak_core.artifacts import SCORES, TOKEN_SCORES, ArtifactError, create, open_artifact
from trak_core.lists.lists import suspects
from trak_core.report.explore_data import EACH_ON_PAGE, explore
from trak_core.report.read_results import read_experiment
from trak_core.report.render import experiment_page
from trak_core.report.template_filters import signed
from trak_core.stages.draw_influences import draw_influences
from trak_core.study.show_samples import contents_digest
from trak_core.study.study import Study

# Targets of each query, the effect of links, and dialogs of training samples.
PROBE = """
const seen = () => all(".target h3 a").map((link) => link.textContent);
const box = document.querySelector("input[type=search]");
const shown = all(".target").map(words);
const pictures = all("img.sample").map((image) => [image.alt, image.naturalWidth > 0]);
const found = QUERIES.map((query) => { change(box, "value", query); return seen(); });
location.hash = ANCHORS[0];
await waited();
const followed = [seen(), box.value, document.activeElement.id];
const opened = [];
for (const anchor of ANCHORS.slice(1)) {
  location.hash = anchor;
  await waited();
  const dialog = document.querySelector("dialog");
  opened.push([words(dialog.querySelector("h2")), all("li", dialog).map(words), dialog.open]);
}
document.querySelector("dialog button").click();
for (let i = 0; i < 20 && location.hash; i += 1) await waited();
done([shown, pictures, found, followed, opened, location.hash, all("script").length]);
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
@pytest.mark.parametrize("way", CODES)
def test_a_browser_explores_the_page(results, shown_as, tmp_path, way):
    _, (answer, _) = shown_as[way]
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    targets = pd.read_hdf(results / "scores/mine.h5", "targets")["id"].tolist()
    beside = {target: set(top[top.target_id == target].train_id) for target in targets}
    queries = {
        "": targets,
        "onerror=ALERT(2)": [HOSTILE[1]],
        "nowhere plain": [],
        "\uff50lain target": ["plain"],  # a wide p
    }
    # 9 is in row-9, not in row-19. No text has these numbers.
    numbers = {f"row-{n}": [t for t in targets if f"row-{n}" in beside[t]] for n in (4, 5, 9)}
    if way == "described":
        queries["<script>alert(0)"] = [
            t for t in targets if "<script>alert(0)</script>" in beside[t]
        ]
        numbers = {f"{n}": [t for t in targets if f"row-{n}" in beside[t]] for n in (4, 5, 6, 8, 9)}
        others = {n: {*targets} - {*has} for n, has in numbers.items()}
        assert any(f"row-1{n}" in beside[t] for n, left_out in others.items() for t in left_out)
    queries |= numbers | {"no such text": []}
    trained = top.train_id.drop_duplicates().tolist()
    samples = [("target", targets[0]), *(("train", i) for i in trained)]
    anchors = [f"{kind}-{quote(i, safe='')}" for kind, i in samples]
    probe = PROBE.replace("QUERIES", json.dumps(list(queries)))
    said = in_browser(answer, tmp_path, probe.replace("ANCHORS", json.dumps(anchors)))
    shown, pictures, found, followed, opened, left, n_scripts = said
    names = {target: f"target {target}" for target in targets}
    assert found == [[names[target] for target in expected] for expected in queries.values()]
    assert followed == [list(names.values()), "", anchors[0]]
    for target, text in zip(targets, shown, strict=True):
        assert text.startswith(f"target {target} label")
        for row in top[(top.target_id == target) & (top["rank"] <= 10)].itertuples():
            assert f"{signed(row.score)} train {row.train_id} label" in text
    assert (len(pictures) > 4) is (way == "drawn")
    assert all(alt.startswith(("target ", "training example ")) for alt, _ in pictures)
    assert all(is_loaded for _, is_loaded in pictures)
    for sample, (name, items, is_open) in zip(trained, opened, strict=True):
        mine = top[(top.train_id == sample) & (top["rank"] <= 10)]
        # Largest first by two digits, then in the order of targets.
        mine = mine.assign(size=[float(f"{abs(score):.2g}") for score in mine.score])
        mine = mine.assign(place=mine.target_id.map(targets.index))
        mine = mine.sort_values(["sign", "size", "place"], ascending=[False, False, True])
        expected = list(mine.itertuples())
        assert name == f"train {sample}"
        assert is_open
        assert len(items) == len(expected)
        for item, row in zip(items, expected, strict=True):
            assert item.startswith(f"{signed(row.score)} target {row.target_id} label")
    assert left == ""
    assert n_scripts == 3  # no text of the study became one


def explored(results, study_file, size=1.0, model_output=None, **columns):
    """Return the contents of a page, for targets with other columns and scaled scores."""
    study = Study.load(study_file)
    experiment = read_experiment(results / "scores/mine.h5", results, 4, EACH_ON_PAGE)
    targets = experiment.tables["targets"].assign(**columns)
    top, train = (experiment.tables[name] for name in ("top_influences", "train"))
    tables = {**experiment.tables, "targets": targets}
    if size != 1:
        tables["top_influences"] = top.assign(score=size * top["score"])
        harm = size * (1 + 1e-5 * (7 * np.arange(len(train)) % 5))
        tables["train"] = train.assign(harm=harm)
    experiment = replace(experiment, tables=tables)
    if columns or model_output:
        spec = experiment.spec | {"model_output": model_output or "text_classification"}
        experiment = replace(experiment, spec=spec)
    splits = study.split("train", None), study.split("mine", [*HOSTILE, "plain"])
    return explore(experiment, study, *splits)


def written(contents, folder):
    """Write a page, and return its file."""
    answer = folder / "answer.html"
    answer.write_text(experiment_page(contents, "study.py"))
    check_alone(Page(answer.read_text()))
    return answer


def test_regression_has_no_helpful_or_harmful_samples(results, shown_as):
    """To raise or lower a number is neither help nor harm."""
    study, (answer, _) = shown_as["described"]
    of_own, of_loss = (
        experiment_page(explored(results, study, model_output=output), "study.py")
        for output in ("own.py:f", "loss")
    )
    for page in (answer.read_text(), report_of(results), of_own):
        subject = "f" if page is of_own else "the prediction"
        assert f"Raise {subject} most" in page
        assert f"Lower {subject} most" in page
        assert not re.search(r"helpful|harmful", page, re.I)
    assert "Most helpful: push f up" in of_loss


def test_equal_samples_are_marked(results, tmp_path):
    """Training samples of a target that are equal to each other or to it, whatever their labels."""
    top = pd.read_hdf(results / "scores/mine.h5", "top_influences")
    harmful = top[(top.target_id == HOSTILE[0]) & (top.score < 0) & top.train_id.str.match("row-")]
    rows = [int(sample_id.removeprefix("row-")) for sample_id in harmful.train_id]
    others = [row for row in range(1, 20) if row not in rows][:3]
    copies = f"x[{rows[:2]}] = x[[20]]\nx[{others[1:]}] = x[[{others[0]}]]\n"
    study = study_with(tmp_path, f"{DESCRIBE}\n{copies}")
    assert not any(target["equal_harms"] for target in explored(results, study).targets)
    contents = explored(results, study, model_output="loss")
    groups = {f"row-{row}": 0 for row in rows[:2]} | {f"row-{row}": 1 for row in others}
    n_marked, n_warned = 0, 0
    for number, target in enumerate(contents.targets):
        own = top[(top.target_id == target["id"]) & (top["rank"] <= EACH_ON_PAGE)]
        kinds = own.train_id.map(groups)
        for place, *_ in target["influences"]:
            sample_id = contents.train[place]["id"]
            n = int((kinds == groups.get(sample_id, -1)).sum())
            expected = ["equal to the target"] if number == 0 and groups.get(sample_id) == 0 else []
            expected += [f"one of {n} equal samples here"] if n > 1 else []
            assert target["equal"].get(place, "") == ", ".join(expected)
            n_marked += bool(expected)
        warns = number == 0 and bool(((kinds == 0) & (own.score < 0)).any())
        assert bool(target["equal_harms"]) == warns
        n_warned += warns
    assert n_marked > 3
    assert n_warned == 1
    if CHROMIUM:
        said = in_browser(written(contents, tmp_path), tmp_path, "done(all('mark').map(words));")
        assert len(said) == n_marked + n_warned


def test_the_digest_of_contents_depends_on_inputs_only():
    tokens = torch.tensor([3, 1, 2])
    text = {"input_ids": tokens, "labels": tokens}
    asked = {"input_ids": tokens.clone(), "labels": torch.tensor([-100, -100, 2])}
    assert contents_digest(text) == contents_digest(asked)
    assert contents_digest((tokens, 0)) == contents_digest((tokens, 1))
    others = [
        {"input_ids": tokens.flip(0), "labels": tokens},
        *((tokens, tokens, 0), (tokens[None], 0), (tokens.float(), 0), ("3 1 2", 0), ("3 1 3", 0)),
    ]
    digests = [contents_digest(sample) for sample in (text, (tokens, 0), *others)]
    assert len(set(digests)) == len(digests)


FILTER = """
const controls = document.querySelector(".find");
const seen = () => all(".target h3 a").map((link) => link.textContent);
const labels = all("label", controls);
const of = (name) => labels.find((label) => label.textContent.includes(name)).lastElementChild;
const changed = (...given) => { change(...given); return seen(); };
const wrong = changed(all("input[type=checkbox]", controls)[0], "checked", true);
const site = changed(of("site"), "value", "=<b>north</b>");
change(of("site"), "value", "");
change(all("input[type=checkbox]", controls)[0], "checked", false);
const order = changed(of("Order"), "value", "1");
done([wrong, site, order, labels.map((label) => label.textContent.split(" ")[0])]);
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
def test_a_browser_filters_and_sorts(shown_as, results, tmp_path):
    columns = {
        "label": [1, 0, 3, 0],
        "prediction": [1, 2, 3, 4],
        "site": ["<b>north</b>", "south", "south", "<b>north</b>"],
        "output": [0.5, -2.0, 1.0, -1.0],
    }
    contents = explored(results, shown_as["described"][0], **columns)
    assert [target["wrong"] for target in contents.targets] == [False, True, False, True]
    last = contents.targets[-1]
    assert (last["words"], last["more"]) == ("label 0, predicted 4", "site <b>north</b>")
    answer = written(contents, tmp_path)
    names = [f"target {i}" for i in (*HOSTILE, "plain")]
    wrong, site, order, filters = in_browser(answer, tmp_path, FILTER)
    # No filter by prediction, because each target has a different one.
    assert filters == ["Find", "label", "site", "", "Order"]
    assert wrong == [names[1], names[3]]
    assert site == [names[3]]
    assert order == [names[i] for i in (1, 3, 0, 2)]


TINY = """
const widths = all(".target .bar").map((bar) => bar.style.width);
const [controls] = all(".find").filter((one) => one.ariaLabel === "trains");
const order = all("select", controls).at(-1).selectedOptions[0].textContent;
done([widths, order, all("#train-list h3 a").map((link) => link.textContent)]);
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
def test_a_browser_reads_tiny_scores_and_keeps_the_order_of_suspects(shown_as, results, tmp_path):
    """Scores that are shown with an exponent, and harm that differs only in its last digits."""
    contents = explored(results, shown_as["described"][0], size=1e-6)
    answer = written(contents, tmp_path)
    assert any("e\N{MINUS SIGN}" in score for t in contents.targets for _, score in t["influences"])
    train = contents.experiment.tables["train"]
    widths, order, listed = in_browser(answer, tmp_path, TINY)
    assert widths
    assert all(re.fullmatch(r"[0-9]+%", width) for width in widths)
    assert order == "harm, largest first"
    shown = {entry["id"] for entry in contents.train}
    expected = [f"train {i}" for i in suspects(train)["id"] if i in shown]
    assert len(expected) > 4
    assert listed == expected


COLOURS = """
const pair = (span) => [span.textContent, span.style.backgroundColor !== ""];
const texts = all(".this, .tile").map((text) => all(".tokens span", text).map(pair));
done([texts, document.querySelector(".most").textContent]);
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
def test_a_page_colours_tokens(results, tmp_path):
    words = ["<script>alert(4)</script>", "</span>", " ", "&amp;"]
    study = study_with(tmp_path, f"{DESCRIBE}\ndef token_texts(sample):\n    return {words!r}\n")
    with open_artifact(results / "scores/mine.h5", SCORES) as file:
        top, scores_hash = file.table("top_influences"), file.content_hash
    scores = {"train": [0.5, 0.0, -0.25, 0.01, 7.0], "target": [0.0, 0.1, 0.2, 0.4, -7.0]}
    rows = [
        (row.target_id, row.train_id, side, token if token < 4 else -1, score)
        for side, own in scores.items()
        for row in top.itertuples()
        for token, score in enumerate(own)
    ]
    names = ["target_id", "train_id", "side", "token", "score"]
    path = tmp_path / "tokens.h5"
    with create(path, TOKEN_SCORES, {"scores": scores_hash}, {}) as writer:
        writer.table("tokens", pd.DataFrame(rows, columns=names), [])
        writer.table("layers", pd.DataFrame({"score": [0.0]}), [])
    files = {key: tmp_path / f"mine.{key}" for key in ("answer", "texts")}
    inputs = {"scores": results / "scores/mine.h5", "study_file": study, "code": "code"}
    draw_influences(**files, **inputs, token_scores=[path])
    check_alone(Page(files["answer"].read_text()))
    data = data_of(Page(files["answer"].read_text()))
    for target in data["targets"]:
        assert target["levels"] == [0, 2, 4, 9]
        assert {tuple(levels) for _, _, levels in target["influences"]} == {(9, 0, -4, 0)}
    texts, most = in_browser(files["answer"], tmp_path, COLOURS)
    coloured = {"this": [False, True, True, True], "tile": [True, False, True, False]}
    expected = [[list(pair) for pair in zip(words, c, strict=True)] for c in coloured.values()]
    assert texts[0] == expected[0]
    assert texts[1] == expected[1]
    assert most == "Most by \u201c&amp;\u201d up, \u201cspace\u201d up, \u201c</span>\u201d up"
    with create(path, TOKEN_SCORES, {"scores": "another"}, {}) as writer:
        for key in ("tokens", "layers"):
            writer.table(key, pd.DataFrame(rows, columns=names), [])
    with pytest.raises(ArtifactError, match="scores"):
        draw_influences(**files, **inputs, token_scores=[path])


@pytest.mark.parametrize("way", CODES)
def test_a_page_shows_how_much_it_leaves_out(results, shown_as, monkeypatch, way):
    study_file, (answer, _) = shown_as[way]
    whole = explored(results, study_file)
    assert whole.n_left_out == (0, 0)
    page = Page(answer.read_text())
    assert "contains the scores of all" not in page.text
    # A limit for the rows of some targets.
    entries = [*whole.targets[:2], *whole.train]
    most = len(json.dumps([{**entry, "sample": None} for entry in entries]))
    monkeypatch.setattr("trak_core.report.explore_data._ROWS", most)
    fewer = explored(results, study_file)
    n_targets, _ = fewer.n_left_out
    assert 0 < n_targets < 4
    words = " ".join(experiment_page(fewer, "study.py").split())
    assert f"{n_targets} more target{'s are' if n_targets > 1 else ' is'} not shown here" in words
    # A limit for the samples of the first target, and a few more.
    monkeypatch.setattr("trak_core.report.explore_data._ROWS", 10**6)
    monkeypatch.setattr("trak_core.report.explore_data._PAGE", 110_000)
    monkeypatch.setattr("trak_core.report.explore_data._FIRST", 1)
    small = explored(results, study_file)
    n_targets, n_samples = small.n_left_out
    assert n_targets == 0
    first = small.targets[0]
    at_once = [first, *(small.train[place] for place, _ in first["influences"])]
    assert all(entry["sample"] is not None for entry in at_once)
    if way == "drawn":
        assert n_samples > 0
        words = " ".join(experiment_page(small, "study.py").split())
        assert f"{n_samples} samples are shown without their pictures" in words
