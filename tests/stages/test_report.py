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
from reported import HOSTILE, TARGETS, config_of, lds, page_of, write

import trak_core.report
from trak_core.artifacts import (
    EVALUATION,
    GROUPS,
    REMOVALS,
    SCORES,
    SELF_INFLUENCE,
    create,
    open_artifact,
)
from trak_core.report.describe_samples import EACH
from trak_core.report.render import rendered
from trak_core.report.template_filters import number, signed

BEYOND = "examples that push f up most by the scores, beyond random examples"
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


def artifact(path, kind, spec=(), attributes=(), **tables):
    with create(path, kind, dict(spec), {"torch": "7.7"}, **dict(attributes)) as writer:
        for key, rows in tables.items():
            writer.table(key, pd.DataFrame(rows), [])
    return path


@pytest.fixture(scope="module")
def measured(results):
    """Return the page of a study with all measurements, with made-up numbers."""
    with open_artifact(results / "scores/mine.h5", SCORES) as scores:
        spec = {"scores": scores.content_hash, "weighting": "plain", "experiment": "mine"}
    setting = {"loss_weight_power": 1.0, "combine": "product_of_averages", "proj_dim": 8}
    sweep = pd.DataFrame([{"damping": 0.5, "lds": 0.31}, {"damping": 2.0, "lds": 0.41}])
    sweep = sweep.assign(**setting, lds_chosen_by=sweep["lds"], lds_reported=sweep["lds"])
    best = sweep.drop(columns="lds").assign(setting=["config", "best"], low=0.1, high=0.5)
    correlations = {"method": ["scores", "noise_ceiling"], "correlation": [0.25, 0.75]}
    by_target = pd.merge(pd.DataFrame(correlations), pd.Series(TARGETS, name="target_id"), "cross")
    subsets = ("top", "random", "top less random")
    means = {"change": [-3.5, -0.25, -3.25], "flips": [0.1875, 0.25, -0.0625]}
    rows = [
        (measure, *row) for measure, own in means.items() for row in zip(subsets, own, strict=True)
    ]
    change = pd.DataFrame(rows, columns=["measure", "subset", "mean"])
    change = change.assign(low=change["mean"] - 1, high=change["mean"] + 1)
    counts = {"n_subsets": 40, "part_kept": 0.5, "n_seeds": 3, "n_targets": 4, "confidence": 0.95}
    trainings = {"confidence": 0.95, "n_trainings": 3, "n_targets": 4}
    evaluation = {
        "summary": lds(0.31, 0.21, 0.11, 0.62)["mine"].tables["summary"],
        "targets": by_target.assign(proj_dim=8),
        "checkpoints": {"n_checkpoints": [1, 2], "lds": [0.1, 0.2], "low": 0.0, "high": 0.5},
        "sweep": sweep,
        "best": best,
    }
    removals = {
        "summary": pd.merge(change, pd.Series([5, 10], name="n"), "cross"),
        "targets": [
            {"measure": "change", "subset": "top", "n": 5, "target_id": "plain", "mean": 1.0}
        ],
    }
    files = {
        "evaluations": artifact(
            results / "evaluation/mine.h5", EVALUATION, spec, counts, **evaluation
        ),
        "removals": artifact(
            results / "removals/mine.h5", REMOVALS, spec | {"list": None}, trainings, **removals
        ),
        "self_influence": artifact(
            results / "self_influence.h5",
            SELF_INFLUENCE,
            train=pd.DataFrame({"label": range(12), "prediction": 1.5}).assign(
                id=lambda rows: "row-" + rows["label"].astype(str),
                self_influence=lambda rows: rows["label"] / 7,
            ),
        ),
    }
    return page_of(results, **{name: [file] for name, file in files.items()})


def test_measurements_are_in_tables(measured):
    for first, cells in {
        "these scores": ["0.310", "0.210", "0.900", "", "", ""],
        "ceiling: the estimated LDS of a perfect method": ["0.620"],
        "inner products of gradients": ["0.110", "0.000", "0.500", "0.200", "-0.100", "0.400"],
        "best of the sweep": ["2"],
        "this config": ["0.5", "1", "product of averages", "8", "0.310", "0.310"],
        "change of f, examples that push f up most by the scores": ["5", "-3.5"],
        f"change of f, {BEYOND}": ["5", "-3.25", "-4.25", "-2.25"],
        f"another class predicted, {BEYOND}": ["5", "-0.0625"],
        "row-11": ["11", "1.5", "1.57"],
    }.items():
        row = [cell.replace("\N{MINUS SIGN}", "-") for cell in measured.row(first)]
        assert row[: len(cells)] == cells
    assert "row-1 " not in measured.text[measured.text.index("The largest. All are in") :]


def test_measurements_of_other_scores_are_refused(results):
    with open_artifact(results / "scores/mine.h5", SCORES) as scores:
        expected = scores.content_hash
    for kind, key in ((EVALUATION, "evaluations"), (REMOVALS, "removals")):
        tables = {table: [{"subset": "top"}] for table in kind.keys}
        about = {"scores": "another", "experiment": "mine"}
        other = artifact(results / "other/mine.h5", kind, about, **tables)
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


def test_removals_by_a_list_have_charts(results):
    """Accuracy and loss against the number of examples; `everything` has no number."""
    values = [
        ("everything", 0, 0.5),
        ("list", 4, 0.75),
        ("random", 4, 0.25),
        ("list less random", 4, 0.5),
    ]
    rows = [
        (m, subset, n, mean)
        for m in ("accuracy", "target_loss", "output")
        for subset, n, mean in values
    ]
    summary = pd.DataFrame(rows, columns=["measure", "subset", "n", "mean"])
    summary = summary.assign(low=summary["mean"] - 0.125, high=summary["mean"] + 0.125)
    path = results / "removals/lists/select.h5"
    with open_artifact(results / "scores/mine.h5", SCORES) as scores:
        about = {"experiment": "mine", "list": "select", "scores": scores.content_hash}
    trainings = {"confidence": 0.95, "n_trainings": 5, "n_targets": 4}
    asked = {"evaluation": {"removals": {"select": {}}}}
    artifact(path, REMOVALS, about, trainings, summary=summary, targets=summary)
    shown = page_of(results, removals=[path], asked=asked)
    first = "the first examples of the list select"
    assert shown.row(f"accuracy, {first}") == ["4", "0.75", "0.625", "0.875"]
    assert shown.row(f"loss, {first}, beyond random examples") == ["4", "0.5", "0.375", "0.625"]
    assert shown.row("loss, all training examples") == ["all", "0.5", "0.375", "0.625"]
    charts = [image["alt"] for image in shown.all("img")]
    assert "Accuracy: accuracy against training examples trained on" in charts
    assert "Loss: loss against training examples trained on" in charts
