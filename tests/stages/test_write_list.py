"""Lists are written from files of scores and features, and shown on pages."""

import re
from dataclasses import replace
from urllib.parse import quote

import numpy as np
import pandas as pd
import pytest
from in_browser import CHROMIUM, in_browser
from linear_study import SPEC, with_two_checkpoints
from pipeline import ON_CPU, averaged, run_stages, scores_spec
from report_page import Page
from reported import CODES, DRAW, HOSTILE, STUDY, TARGETS, check_alone, study_with

from trak_core.artifacts import ArtifactError
from trak_core.runtime.files import write_csv
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_scores import compute_scores, compute_self_influence
from trak_core.stages.draw_influences import show_list
from trak_core.stages.retrain import listed_rows
from trak_core.stages.write_list import _write, find_duplicates, write_list
from trak_core.study.sample_columns import with_class_names


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run a study in which training samples 4 and 9, and target 1 and sample 6, are copies."""
    folder = tmp_path_factory.mktemp("lists")
    study, checkpoints, targets = with_two_checkpoints(folder)
    study.write_text(study.read_text() + "\nx[9], y[9] = x[4], y[4]\nx[31], y[31] = x[6], y[6]\n")
    path = run_stages(folder, study, checkpoints, targets, model_output="regression")
    return folder, path, SPEC


def copies_in(folder, listed, spec, memory_mb=500):
    """Return all pairs of the list, those that are equal, and the ids of these."""
    find_duplicates(
        listed=listed,
        train_path=folder / "features/c0/train.h5",
        targets_path=folder / "features/c0/mine.h5",
        spec=spec.under("c0"),
        code="code",
        memory_mb=memory_mb,
    )
    pairs = pd.read_csv(listed)
    exact = pairs[pairs["closeness"] == 1]
    return pairs, exact, exact[["id", "other_id", "among"]].to_numpy().tolist()


@pytest.mark.parametrize("memory_mb", [1, 500])
def test_planted_copies_are_found(finished, tmp_path, memory_mb):
    folder, _, spec = finished
    pairs, exact, names = copies_in(folder, tmp_path / "duplicates.csv", spec, memory_mb)
    assert names == [[9, "4", "train"], [6, "target-1", "mine"]]
    assert exact["label"].tolist() == exact["other_label"].tolist()
    assert pairs["rank"].tolist() == list(range(1, len(pairs) + 1))
    assert exact["cosine"].tolist() == pytest.approx([1, 1], rel=1e-6)


def test_a_target_that_is_a_training_sample_is_not_a_copy(tmp_path):
    """Its pairs are those of the training sample. Other targets with its id are compared."""
    study, checkpoints, _ = with_two_checkpoints(tmp_path)
    study.write_text(
        study.read_text().replace("x[30:], y[30:]", "x[:9], y[:9]").split("def target_ids")[0]
        + "\nx, y = x.clone(), y.clone()\nx[9], y[9] = x[4], y[4]\n"
        # Target 7 and training sample 7 differ. Target 7 is a copy of training sample 20.
        + "def target_data():\n    a, b = x[:9].clone(), y[:9].clone()\n"
        + "    a[7], b[7] = x[20], y[20]\n    return TensorDataset(a, b)\n"
    )
    targets, checkpoints = list(range(9)), {"c0": checkpoints["c0"]}
    run_stages(tmp_path, study, checkpoints, targets, model_output="regression")
    spec = scores_spec(checkpoints, targets, model_output="regression")
    *_, names = copies_in(tmp_path, tmp_path / "duplicates.csv", spec)
    assert names == [[9, 4, "train"], [20, 7, "mine"]]


def test_lists_are_sorted_by_the_table_of_scores(finished, tmp_path):
    folder, path, spec = finished
    train, lists = pd.read_hdf(path, "train"), {}
    given = {"listed": tmp_path / "list.csv", "scores": path, "code": "code"}
    for kind in ("suspects", "drop", "select"):
        write_list(**given, spec=spec, kind=kind, fraction=0.2)
        lists[kind] = pd.read_csv(tmp_path / "list.csv").set_index("id")
    harm = train.set_index("id")["harm"].sort_values(ascending=False, kind="stable")
    assert lists["suspects"].index.tolist() == harm.index.tolist()
    score = (train["help"].astype(float) - train["harm"]).set_axis(train["id"])
    assert lists["drop"].index.tolist() == score[score < 0].sort_values().index.tolist()
    share = score / (train["help"] + train["harm"]).set_axis(train["id"])
    assert lists["select"].index.tolist() == share.nlargest(6).index.tolist()
    features = folder / "features/c0/train.h5"
    with pytest.raises(ArtifactError, match="self_influence"):
        write_list(**given, spec=spec, self_influence=[features], kind="suspects")


@pytest.mark.parametrize("words", [{"larger_is_better": True}, {"larger_is_better": False}, {}])
def test_help_and_harm_need_larger_is_better(tmp_path, words):
    """A user-defined output has help and harm only if the config sets `larger_is_better`."""
    study, checkpoints, targets = with_two_checkpoints(tmp_path)
    function = "def f(returned, label):\n    return -(returned[0] - label).square() / 2\n"
    study.write_text(f"{study.read_text()}\n\n{function}")
    given = {"model_output": f"{study}:f", "damping": 2}
    words = words | {"function": given["model_output"]}
    path = run_stages(tmp_path, study, checkpoints, targets, output_words=words, **given)
    train, about = pd.read_hdf(path, "train"), pd.read_hdf(path, "targets")
    if words.get("larger_is_better"):
        scores = pd.read_hdf(path, "scores").to_numpy(np.float64)
        np.testing.assert_allclose(train["harm"], np.maximum(-scores, 0).mean(axis=1), rtol=1e-5)
        assert about["improves"].tolist() == [1, 1, 1]
    else:
        assert not {"help", "harm"} & set(train)
        assert "improves" not in about


def test_a_list_of_other_scores_is_refused(finished, tmp_path):
    folder, path, spec = finished
    given = {"listed": tmp_path / "list.csv", "scores": path, "code": "code"}
    for changes in ({"experiment": "other"}, {"damping": 3}, {"pool_digest": "pool"}):
        rule = "average_scores_pool" if "pool_digest" in changes else "average_scores"
        match = rf"{path.name}: .*{next(iter(changes))}.*rule {rule}\b"
        with pytest.raises(ArtifactError, match=match):
            write_list(**given, spec=replace(spec, **changes), kind="drop")
    influences = tmp_path / "self.h5"
    compute_self_influence(
        self_influence=influences,
        features=[folder / f"features/{c}/train.h5" for c in spec.checkpoints],
        normal_matrices=[folder / f"normal_matrix/{c}.h5" for c in spec.checkpoints],
        spec=replace(spec, damping=3).of_self_influence(),
        code="code",
        memory_mb=500,
    )
    message = r"self\.h5: .*damping.*rule compute_self_influence"
    with pytest.raises(ArtifactError, match=message):
        write_list(**given, spec=spec, self_influence=[influences], kind="suspects")


def test_a_pool_of_the_training_samples_has_their_scores(tmp_path):
    study, checkpoints, targets = with_two_checkpoints(tmp_path)
    (tmp_path / "again.py").write_text("from study import train_data as target_data\n")
    given = {"model_output": "regression", "combine": "unit_average", "normalize": True}
    path = run_stages(tmp_path, study, checkpoints, targets, **given, keep="top_k")
    spec = scores_spec(checkpoints, targets, **given)
    of_pool = replace(spec, pool_digest="digest")
    parts, pools = [], []
    for checkpoint in sorted(checkpoints):
        own, folder = of_pool.under(checkpoint), tmp_path / "features" / checkpoint
        compute_features(
            features=folder / "pool.h5",
            checkpoint=checkpoints[checkpoint],
            study_file=study,
            spec=own.of_pool(),
            question=tmp_path / "again.py",
            **ON_CPU,
        )
        parts.append(tmp_path / f"pool/mine/{checkpoint}.h5")
        pools.append(folder / "pool.h5")
        inputs = {
            "train_path": folder / "train.h5",
            "targets_path": folder / "mine.h5",
            "normal_matrix": tmp_path / f"normal_matrix/{checkpoint}.h5",
            "pool": pools[-1],
        }
        compute_scores(
            scores=parts[-1], **inputs, spec=own, keep="top_k", code="code", memory_mb=500
        )
    pool = averaged(tmp_path / "pool/mine.h5", parts, of_pool, pools)
    for key in ("train", "top_influences"):
        pd.testing.assert_frame_equal(pd.read_hdf(pool, key), pd.read_hdf(path, key))
    # Scores of the training samples and features of the pool do not belong together.
    train = [tmp_path / f"scores/mine/{checkpoint}.h5" for checkpoint in sorted(checkpoints)]
    with pytest.raises(ArtifactError, match="training features"):
        averaged(tmp_path / "mixed.h5", train, spec, pools)
    with pytest.raises(ArtifactError, match="pool_digest"):
        averaged(tmp_path / "mixed.h5", parts, replace(spec, pool_digest="another pool"), pools)


def test_lists_have_the_names_of_classes(tmp_path):
    """Numbers without a name, and labels that are not classes, stay numbers."""
    (tmp_path / "named.py").write_text("def class_names():\n    return ['cat', 'dog']\n")
    rows = pd.DataFrame({"id": [4, 5, 6], "label": [1, 0, -1], "suggested_label": [0, 0, 2]})
    given = ("label", "prediction", "suggested_label"), tmp_path / "named.py"
    named = with_class_names(rows, *given, "image_classification")
    assert named["label"].tolist() == ["dog", "cat", -1]
    assert named["suggested_label"].tolist() == ["cat", "cat", 2]
    own = with_class_names(
        rows.assign(suggested_label=["?", 1.5, 0]), *given, "image_classification"
    )
    assert own["suggested_label"].tolist() == ["?", 1.5, "cat"]
    assert with_class_names(rows, *given, "multi_label") is rows


@pytest.mark.parametrize(
    ("model_output", "columns"),
    [
        ("language_modelling", ["id", "tokens", "right", "other_tokens"]),
        ("segmentation", ["id", "pixels", "right", "other_pixels"]),
        ("image_classification", ["id", "label", "prediction", "other_label"]),
        ("clip", ["id", "prediction"]),
        ("loss", ["id"]),
    ],
)
def test_columns_of_a_list_say_what_labels_are(model_output, columns, tmp_path):
    rows = pd.DataFrame({"id": [4], "label": [9], "prediction": [7], "other_label": [8]})
    _write(tmp_path / "drop.csv", rows, (), None, model_output)
    assert [*pd.read_csv(tmp_path / "drop.csv")] == columns
    # A column of the study keeps its name.
    _write(tmp_path / "own.csv", rows.assign(tokens="own"), (), None, "language_modelling")
    own = pd.read_csv(tmp_path / "own.csv")
    assert own.iloc[0].to_dict() == {
        **{"id": 4, "label": 9, "right": 7, "other_tokens": 8, "tokens": "own"}
    }


@pytest.mark.parametrize("way", CODES)
def test_a_list_has_a_page_with_its_samples(results, tmp_path, way, capsys):
    """The page has all rows of the CSV in order, with the samples of their ids."""
    listed, page = tmp_path / "suspects.csv", tmp_path / "suspects.html"
    names = dict.fromkeys(("c0", "c1"))
    spec = scores_spec(names, TARGETS, model_output="regression", damping=0.5)
    scores = results / "scores/mine.h5"
    write_list(listed=listed, scores=scores, spec=spec, kind="suspects", code="code")
    study = study_with(tmp_path, CODES[way])
    about = {"experiment": "mine", "study_file": study, "code": "code"}
    show_list(page=page, listed=listed, kind="suspects", scores=[scores], **about)
    shown = Page(page.read_text())
    check_alone(shown)
    rows = pd.read_csv(listed)
    names = [f"{rank}. train {i}" for rank, i in enumerate(rows["id"], start=1)]
    marks = [" worth a look" * looks for looks in rows["worth_a_look"]]
    assert 0 < rows["worth_a_look"].sum() < len(rows)
    places = [
        shown.text.index(f"{name}{mark} label") for name, mark in zip(names, marks, strict=True)
    ]
    assert places == sorted(places)
    links = [f"../answers/mine.html#train-{quote(i, safe='')}" for i in rows["id"]]
    assert [a["href"] for a in shown.all("a") if "#train" in a["href"]] == links
    assert f"{rows['worth_a_look'].sum()} of 20 are worth a look" in shown.text
    assert "With 4 targets, the order of suspects is uncertain." in shown.text
    assert "with only 4 targets, the order of suspects is uncertain." in capsys.readouterr().out
    alts = [f"train {i}" for i in rows["id"]]
    assert [image["alt"] for image in shown.all("img")] == (alts if way == "drawn" else [])
    assert "The suggested label is the class" not in shown.text
    rows.assign(suggested_label=1).to_csv(listed, index=False)
    show_list(page=page, listed=listed, kind="suspects", **about)
    assert "The suggested label is the class" in Page(page.read_text()).text


# Tick two rows, filter, save the CSV, and load the page again.
TICK = """
const boxes = all(".tick input");
if (sessionStorage.saved) {
  // Another process of the browser stores the ticks, which can take longer than loading.
  const tries = Number(sessionStorage.tries ?? 0);
  if (!boxes[3].checked && tries < 20) {
    sessionStorage.tries = tries + 1;
    location.reload();
    return;
  }
  done([...JSON.parse(sessionStorage.saved), boxes.map((box) => box.checked)]);
  return;
}
let saved;
URL.createObjectURL = (blob) => { saved = blob; return "#saved"; };
for (const i of [1, 3]) boxes[i].click();
change(document.querySelector(".find select"), "value", "=cat");
const seen = boxes.map((box) => box.checkVisibility());
document.querySelector(".find button").click();
const output = document.querySelector(".find output").textContent;
sessionStorage.saved = JSON.stringify([seen, await saved.text(), output]);
location.reload();
"""


@pytest.mark.skipif(not CHROMIUM, reason="runs where there is Chromium: apt-get install chromium")
def test_ticked_rows_are_saved_as_a_list(results, tmp_path):
    """The saved CSV is a list that removals can read. Ids may look like formulas."""
    ids, labels = ["row-3", 'a"b, c', "row-5", "=1+1"], ["cat", "dog", "cat", "dog"]
    code = STUDY.replace("TARGETS", repr(ids)).replace("x[0] *= 3", "x[0] *= 2")
    (tmp_path / "pool.py").write_text(code)
    listed, page = tmp_path / "select.csv", tmp_path / "select.html"
    write_csv(listed, pd.DataFrame({"id": ids, "rank": [1, 2, 3, 4], "label": labels}))
    about = {"study_file": study_with(tmp_path, DRAW), "pool": tmp_path / "pool.py", "code": "code"}
    show_list(page=page, listed=listed, kind="select", experiment="mine", **about)
    check_alone(Page(page.read_text()))
    seen, saved, output, ticked = in_browser(page, tmp_path, TICK)
    assert seen == [True, False, True, False]
    assert ticked == [False, True, False, True]
    assert output == "2 of 4 ticked"
    (tmp_path / "saved.csv").write_text(saved)
    read, written = pd.read_csv(tmp_path / "saved.csv"), pd.read_csv(listed)
    assert read["id"].tolist() == written["id"].tolist()[1::2]
    assert read["decision"].tolist() == ["keep", "keep"]
    assert listed_rows(tmp_path / "saved.csv", ids).tolist() == [1, 3]


def test_pairs_and_samples_of_a_pool_have_a_page(results, tmp_path):
    """Both samples of a pair are shown. Ids may look like formulas of a spreadsheet."""
    study = study_with(tmp_path, DRAW)
    about = {"experiment": "mine", "study_file": study, "code": "code"}
    pairs = [("row-3", 1, "row-2", "train"), ("row-5", 2, HOSTILE[1], "mine")]
    rows = pd.DataFrame(pairs, columns=["id", "rank", "other_id", "among"])
    write_csv(tmp_path / "duplicates.csv", rows.assign(closeness=1.0, label=0.5, other_label=0.25))
    page = tmp_path / "duplicates.html"
    show_list(page=page, listed=tmp_path / "duplicates.csv", kind="duplicates", **about)
    shown = Page(page.read_text())
    assert "Copies with different labels may be missing" in shown.text
    check_alone(shown)
    alts = ["train row-3", "train row-2", "train row-5", f"target {HOSTILE[1]}"]
    assert [image["alt"] for image in shown.all("img")] == alts
    assert len({image["src"] for image in shown.all("img")}) == 4
    ids = ["=1+1", "@now", "007", "NA"]
    code = STUDY.replace("TARGETS", repr(ids)).replace(
        "x[0] *= 3", "x[20:] = 0; x[22] = torch.arange(4.0)"
    )
    (tmp_path / "pool.py").write_text(code)
    rows = pd.DataFrame({"id": ids[::-1], "rank": [1, 2, 3, 4], "score": 0.123456})
    rows["site"] = ["north", "", "", ""]
    write_csv(tmp_path / "select.csv", rows)
    show_list(
        page=page, listed=tmp_path / "select.csv", kind="select", pool=tmp_path / "pool.py", **about
    )
    shown = Page(page.read_text())
    check_alone(shown)
    images = shown.all("img")
    assert [image["alt"] for image in images] == [f"pool {i}" for i in ids[::-1]]
    same = [image["src"] == images[0]["src"] for image in images]
    assert same == [True, False, True, True]  # Only the third sample of the pool differs.
    assert shown.text.count("score 0.123") == 4
    assert re.findall(r"site \w*", shown.text) == ["site north"]  # Empty cells are left out.
    write_csv(tmp_path / "drop.csv", rows.head(0))
    show_list(page=page, listed=tmp_path / "drop.csv", kind="drop", **about)
    assert "The list is empty" in Page(page.read_text()).headings
