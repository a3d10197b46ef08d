"""The report: a page without further files, with the numbers of the artifacts."""

import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
from jinja2 import UndefinedError
from refused import refused
from report_page import Page
from reported import HOSTILE, check_alone, config_of, page_of, write
from sklearn.metrics import r2_score

import trak_core.report
from trak_core.artifacts import EVALUATION, GROUPS, REMOVALS, SCORES, create, open_artifact
from trak_core.report.describe_samples import EACH
from trak_core.report.render import rendered
from trak_core.report.template_filters import fixed, number, signed

TEMPLATES = Path(trak_core.report.__file__).parent / "templates"


@pytest.fixture(scope="module")
def page(results):
    return page_of(results)


def test_the_page_is_deterministic_and_self_contained(page, results):
    assert write(results) == page.markup  # the same artifacts give the same bytes


def test_texts_of_users_are_escaped(page, results):
    study = config_of(results)["study"]
    for text in (*HOSTILE, "<script>alert(0)</script>", "<u>c0</u>.pt", study):
        assert text in page.text
    assert "onerror=alert(2)>" not in page.markup


def test_examples_are_the_strongest_of_each_target(page, results):
    scores = pd.read_hdf(results / "scores/mine.h5", "scores")
    for target in scores.columns:
        mine = scores[target].sort_values(ascending=False, kind="stable")
        block = page.text[page.text.index(f"target {target} label") :].split("target ", 2)[1]
        shown = re.findall(r"train (\S+) label", block)
        helpful = mine[mine > 0].index[:EACH].tolist()
        harmful = mine[mine < 0].index[::-1][:EACH].tolist()
        assert shown == helpful + harmful


def test_the_worked_example_is_of_this_study(page, results):
    scores = pd.read_hdf(results / "scores/mine.h5", "scores")[HOSTILE[0]]
    up, down = scores.max(), scores.min()
    example = page.text[page.text.index("Example.") :]
    assert f"Training sample {scores.idxmax()} has its largest score, +{number(up, 2)}" in example
    assert f"Sample {scores.idxmin()} has the lowest score, {number(down, 2)}" in example
    assert f"{number(max(abs(up / down), abs(down / up)), 2)} times as large" in example


def test_pages_state_the_fit_and_warn_of_a_bad_one(page, results, shown_as, capsys):
    """The job prints it too. These networks were not trained; other fits are in test_fit.py."""
    train = pd.read_hdf(results / "scores/mine.h5", "train")
    value = r2_score(train["label"], train["prediction"])
    stated = f"The models predict the labels of their training samples with an R2 of {value:.3g}."
    write(results)
    assert stated in capsys.readouterr().out
    assert stated in page.text
    bad = "The models predict their training samples badly"
    assert bad in page.headings
    assert bad in Page(shown_as["printed"][1][0].read_text()).text


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
    assert page.row("torch") == [version("torch")]
    assert page.row("numpy") == [np.__version__]
    checkpoint = results.parent / "c1.pt"
    assert hashlib.sha256(checkpoint.read_bytes()).hexdigest() in page.text


def test_exact_scores_have_no_condition_numbers(results, page):
    exact = page_of(results.parent / "exact", exact=True)
    assert "Condition numbers" not in exact.text
    assert "Condition numbers" in page.text


# Rows of tables, by what files call them.
METHODS = {
    "scores": "these scores",
    "gradient_dot": "inner products of gradients",
    "noise_ceiling": "ceiling: the estimated LDS of a perfect method",
}
MEASURES = {
    **{"change": "change of f", "flips": "another class predicted"},
    **{"target_loss": "loss", "accuracy": "accuracy"},
}
SUBSETS = {
    "everything": "all training examples",
    "top": "examples that push f up most by the scores",
    "list": "the first examples of the list drop",
    "random": "random examples",
    "embedding_cosine": "examples with the most similar embeddings",
}


@pytest.mark.gate  # a run of Snakemake
def test_measurements_are_in_tables(evaluated):
    """Evaluations, removals for targets and by a list, and self-influence of a study that ran."""
    results = evaluated.path("results")
    page = Page((results / "report.html").read_text())
    check_alone(page)
    summary = pd.read_hdf(results / "evaluation/few.h5", "summary").set_index("method")
    for method, name in METHODS.items():
        keys = ("lds", "low", "high", "behind", "behind_low", "behind_high")
        cells = [fixed(summary.loc[method, key], 3) for key in keys]
        assert page.row(name) == (cells[:3] + [""] * 3 if method == "scores" else cells)
    best = pd.read_hdf(results / "evaluation/few.h5", "best").set_index("setting")
    for setting, name in (("best", "best of the sweep"), ("config", "this config")):
        row = best.loc[setting]
        lds = [fixed(row[key], 3) for key in ("lds_chosen_by", "lds_reported", "low", "high")]
        settings = [number(row["damping"]), number(row["loss_weight_power"])]
        settings += [row["combine"].replace("_", " "), str(row["proj_dim"])]
        assert page.row(name) == settings + lds
    for file, baseline in (("few", "embedding_cosine"), ("lists/drop", "random")):
        means = pd.read_hdf(results / f"removals/{file}.h5", "summary")
        means = means[means["measure"].isin(MEASURES)]  # not f, which is in both tables
        assert means["subset"].str.endswith(f" less {baseline}").any()
        for row in means.drop_duplicates(["measure", "subset"]).itertuples():
            own, _, other = row.subset.partition(" less ")
            name = f"{MEASURES[row.measure]}, {SUBSETS[own]}"
            name += f", beyond {SUBSETS[other]}" if other else ""
            cells = [number(row.mean), number(row.low), number(row.high)]
            assert page.row(name) == [str(row.n or "all"), *cells], name
    train = pd.read_hdf(results / "self_influence.h5", "train").nlargest(3, "self_influence")
    for row in train.itertuples():
        assert page.row(str(row.id))[-1] == number(row.self_influence)
    charts = [image["alt"] for image in page.all("img")]
    assert "Accuracy: accuracy against training examples removed" in charts
    assert "Loss: loss against training examples removed" in charts


def test_measurements_of_other_scores_are_refused(results):
    with open_artifact(results / "scores/mine.h5", SCORES) as scores:
        expected = scores.content_hash
    for kind, key in ((EVALUATION, "evaluations"), (REMOVALS, "removals")):
        other = results / "other/mine.h5"
        with create(other, kind, {"scores": "another", "experiment": "mine"}, {}) as writer:
            for table in kind.keys:
                writer.table(table, pd.DataFrame([{"subset": "top"}]), [])
        values = ("other/mine.h5", "scores/mine.h5", "another", expected)
        with refused("report.other_scores", *values):
            write(results, **{key: [other]})


def test_an_undefined_name_in_a_template_is_an_error():
    with pytest.raises(UndefinedError, match="results"):
        rendered("trust")


def test_only_style_and_escaped_data_are_not_escaped_by_templates():
    templates = {path.name: path.read_text() for path in TEMPLATES.rglob("*.j2")}
    assert len(templates) > 10
    taken = [name for name, text in templates.items() for _ in re.findall(r"\|\s*safe", text)]
    # The JSON of an answer has no character of markup.
    assert sorted(taken) == ["answer.html.j2", "frame.html.j2"]
    assert not [name for name, text in templates.items() if "autoescape" in text]


def test_groups_have_a_chart_and_a_table(results):
    """Names of groups are escaped, and the largest difference is first."""
    names, pairs = ["<b>anna", "$x^{"], [("<b>anna", "$x^{", 0.25), ("$x^{", "<b>anna", -0.5)]
    groups = pd.DataFrame({"column": "who", "group": names, "n": [12, 8], "sum": [6.0, -2.0]})
    groups = groups.assign(mean=[0.5, -0.25], low=[0.25, -0.5], high=[0.75, 0.125])
    columns = ["group", "other", "difference"]
    differences = pd.DataFrame(pairs, columns=columns).assign(column="who", low=-1.0, high=1.0)
    with open_artifact(results / "scores/mine.h5", SCORES) as file:
        about = {"scores": file.content_hash, "experiment": "mine"}
    path = results / "groups/mine.h5"
    path.parent.mkdir(exist_ok=True)
    with create(path, GROUPS, about, {}, confidence=0.95, n_runs=2, n_targets=4) as writer:
        for key, table in (("groups", groups), ("targets", groups), ("differences", differences)):
            writer.table(key, table, [])
    shown = page_of(results, groups=[path])
    assert shown.row("<b>anna") == ["12", *map(signed, (0.5, 0.25, 0.75, 6.0))]
    assert shown.text.index("$x^{ less <b>anna") < shown.text.index("<b>anna less $x^{")
    charts = [image["alt"] for image in shown.all("img")]
    assert "By who: mean score of each who" in charts
