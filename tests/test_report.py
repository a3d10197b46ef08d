"""The report is one page that needs nothing beside it and says what the artifacts hold."""

import base64
import hashlib
import io
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.pyplot import imread
from pipeline import run_exact_stages, run_stages
from report_page import Page

from trak_core.artifacts import (
    COUNTERFACTUAL,
    DIAGNOSTICS,
    EVALUATION,
    MISLABELLED,
    SELF_INFLUENCE,
    ArtifactError,
    create,
)
from trak_core.report.cautions import cautions
from trak_core.report.elements import Html, element, number, plural
from trak_core.report.examples import EACH, targets_shown
from trak_core.report.facts import Distortion, Error, Experiment, Facts, Matrix, Measured, Source
from trak_core.report.glance import trust
from trak_core.report.samples import drawn, printed
from trak_core.stages.report import write_report
from trak_core.stages.timings import read_timings

# Ids and paths are a user's: they may look like markup, and must show as they are.
HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "&amp;<b>'"]
STUDY = """
import torch
from torch.utils.data import TensorDataset

x = torch.linspace(-1, 1, 24 * 4).sin().reshape(24, 4) * torch.arange(1.0, 5)
x[0] *= 3
y = x.sum(1)

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))

def train_data():
    return TensorDataset(x[:20], y[:20])

def target_data():
    return TensorDataset(x[20:], y[20:])

def train_ids():
    return ["<script>alert(0)</script>"] + [f"row-{i}" for i in range(1, 20)]

def target_ids():
    return HOSTILE + ["plain"]
"""
DRAW = """
def draw(axes, sample):
    axes.imshow(sample[0].reshape(2, 2).numpy(), cmap="gray")
    axes.set_title("<i>")
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Scores of a study with two checkpoints, four targets, and everything a report reads."""
    folder = tmp_path_factory.mktemp("report")
    study = folder / "a<b>&'study.py"
    study.write_text(STUDY.replace("HOSTILE", repr(HOSTILE)))
    checkpoints = {}
    for name in ("c0", "c1"):
        torch.manual_seed(int(name[1]))
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        checkpoints[name] = folder / f"{name}.pt"
        torch.save(model.state_dict(), checkpoints[name])
    settings = {"model_output": "regression", "damping": 0.5}
    targets = [*HOSTILE, "plain"]
    run_stages(folder / "results", study, checkpoints, targets, proj_dim=8, **settings)
    run_exact_stages(folder / "exact", study, checkpoints, targets, **settings)
    return folder / "results"


def config_of(results):
    return {
        "study": str(results.parent / "a<b>&'study.py"),
        "model_output": "regression",
        "checkpoints": {"c0": "<u>c0</u>.pt", "c1": "c1.pt"},
        "experiments": {"mine": {"targets": HOSTILE}},
        "scoring": {"damping": 0.5},
    }


def write(results, study=None, exact=False, **more):
    config = config_of(results)
    report = results / "report.html"
    matrices = [] if exact else [results / f"normal_matrix/c{i}.h5" for i in range(2)]
    files = dict.fromkeys(
        ("diagnostics", "evaluations", "counterfactuals", "mislabelled", "self_influence"), ()
    )
    write_report(
        report=report,
        scores=[results / "scores/mine.h5"],
        normal_matrices=matrices,
        study=Path(study or config["study"]),
        config=config,
        **(files | more),
    )
    return report.read_text()


@pytest.fixture(scope="module")
def markup(results):
    return write(results)


@pytest.fixture(scope="module")
def page(markup):
    return Page(markup)


def check_alone(page):
    """Nothing is fetched, run or left open; everything has a name for who can't see it."""
    assert page.closed_in_order
    names = {name for name, _ in page.elements}
    assert not names & {"script", "iframe", "object", "embed", "base", "form", "link", "video"}
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for name, attributes in page.elements:
        assert not [key for key in attributes if key.startswith("on")], (name, attributes)
        for key in ("src", "href", "srcset", "action", "data", "poster", "xlink:href"):
            value = attributes.get(key)
            assert value is None or value.startswith("data:image/") or value[1:] in ids, value
    assert not re.search(r"url\(|@import", "".join(page.styles))
    assert all(image["alt"] for image in page.all("img"))
    assert all(cell.get("scope") for cell in page.all("th"))
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(n[1]) for n, _ in page.elements if re.fullmatch(r"h[1-6]", n)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 2 for before, after in pairwise(levels))


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


def test_scores_of_an_earlier_version_are_refused(results, tmp_path):
    old = Path(__file__).parent / "data/artifacts/1/scores.h5"
    folder = tmp_path / "results/scores"
    folder.mkdir(parents=True)
    (folder / "mine.h5").write_bytes(old.read_bytes())
    with pytest.raises(ArtifactError, match=r"mine\.h5: .*'targets'.*rule average_scores"):
        write(tmp_path / "results")


def decoded(picture):
    found = re.search(r"data:image/(\w+);base64,([^\"]+)", picture)
    data = base64.b64decode(found[2])
    return found[1], imread(io.BytesIO(data), format=found[1])


def test_a_picture_fills_its_tile(tmp_path):
    quarters = np.array([[0, 1], [1, 0]])
    kind, pixels = decoded(drawn(lambda a, s: a.imshow(s, cmap="gray"), quarters, "x"))
    assert kind == "png"
    height, width = pixels.shape[:2]
    assert abs(height - width) <= 2
    for i in (0, 1):
        for j in (0, 1):
            found = pixels[height * (1 + 2 * i) // 4, width * (1 + 2 * j) // 4, 0]
            assert found == quarters[i, j]


def test_a_photograph_is_kept_small():
    noise = np.random.default_rng(0).random((200, 200, 3))
    kind, pixels = decoded(drawn(lambda a, s: a.imshow(s), noise, "x"))
    assert kind == "jpeg"
    assert pixels.shape[2] == 3


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


@pytest.mark.parametrize(
    ("n_experiments", "shown"), [(1, [20]), (7, [17] * 7), (120, [1] * 120), (150, [1] * 120)]
)
def test_many_targets_and_experiments_are_cut(n_experiments, shown):
    assert targets_shown(n_experiments) == shown + [0] * (n_experiments - len(shown))


def test_targets_left_out_are_said_to_be(results, monkeypatch):
    monkeypatch.setattr("trak_core.report.examples._TARGETS", 1)
    page = Page(write(results))
    check_alone(page)
    assert "3 targets more not shown here: scores/mine.h5 has the scores of all" in page.text
    assert page.text.count("Most helpful") == 1


def test_elements_escape_all_but_markup():
    assert element("p", "<&\"'>", title='"x"') == (
        '<p title="&quot;x&quot;">&lt;&amp;&quot;&#x27;&gt;</p>'
    )
    assert element("p", element("br"), class_=None) == "<p><br></p>"
    assert not isinstance(Html("a") + "<", Html)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-0.00344, "\N{MINUS SIGN}0.00344"),
        (12.345, "12.3"),
        (1234.5, "1,234"),
        (123456.0, "123,456"),
        (2e7, "2e+07"),
        (1e-9, "1e\N{MINUS SIGN}09"),
    ],
)
def test_numbers_read_well(value, text):
    assert number(value) == text


def test_plurals():
    assert [plural(n, "target") for n in (0, 1, 2000)] == ["0 targets", "1 target", "2,000 targets"]


def test_timings_are_summed_by_rule_and_leftovers_left_out(tmp_path):
    head = "s\th:m:s\tmax_rss\n"
    for name, rows in {
        "compute_features/c0/train.tsv": "2.5\t0:00:02\t100.5\n",
        "compute_features/c1/1-of-2.tsv": "4\t0:00:04\tNA\n",
        "compute_features/gone/train.tsv": "1000\t0:16:40\t9000\n",
        "retrain_subsets/0-24.tsv": "7\t0:00:07\t-\n",
        "compare_runs.tsv": "1\t0:00:01\t10\n1\t0:00:01\t30\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + rows)
    found = {t.rule: t for t in read_timings(tmp_path, {"c0", "c1", "train"})}
    features = found["compute_features"]
    assert (features.n_jobs, features.seconds, features.longest_seconds) == (2, 6.5, 4)
    assert features.peak_mib == 100.5
    assert found["retrain_subsets"].peak_mib is None
    assert (found["compare_runs"].n_jobs, found["compare_runs"].peak_mib) == (2, 30)
    assert read_timings(tmp_path / "nothing", set()) == []


SOURCE = Source("scores/mine.h5", "hash", {}, {})


def facts(n_checkpoints=10, saturated=0.0, sd=0.1, smallest=1.0, power=1.0, **more):
    spec = {
        "checkpoints": [{"id": f"c{i}", "sha256": ""} for i in range(n_checkpoints)],
        "loss_weight_power": power,
    }
    targets = [{"id": i, "margin": float(i), "margin_sd": sd} for i in range(8)]
    source = replace(SOURCE, spec=spec)
    experiment = Experiment("mine", source, "relative", 100, saturated, targets, {})
    matrix = Matrix("c0", SOURCE, smallest, 1e3, 1.0, 100)
    return Facts({"scoring": {"damping": 0}}, [experiment], [matrix], [], **more)


def titles(*arguments, **more):
    return [one.title for one in cautions(facts(*arguments, **more))]


def test_nothing_to_warn_of():
    assert titles() == []


@pytest.mark.parametrize(
    ("change", "title"),
    [
        ({"n_checkpoints": 4}, "Few checkpoints"),
        ({"saturated": 0.51}, "Saturated loss weights"),
        ({"smallest": 0.9e-3}, "Near-singular matrices"),
        ({"smallest": -1e-9}, "Near-singular matrices"),
        ({"sd": 2.3}, "The checkpoints disagree"),
    ],
)
def test_each_warning_comes_alone(change, title):
    assert titles(**change) == [title]


def test_a_saturated_study_with_a_power_below_one_gets_other_advice():
    plain, lifted = (cautions(facts(saturated=0.9, power=p))[0].remedy for p in (1.0, 0.5))
    assert "Set scoring.loss_weight_power to 0.5" in plain
    assert "is 0.5 already" in lifted


@pytest.mark.parametrize(("measured", "warned"), [(0.11, False), (0.2, True), (0.05, False)])
def test_a_projection_that_distorts_too_much(measured, warned):
    good, bad = Error(0.1, 0.01, 0.1), Error(measured, 0.01, 0.1)
    one = Distortion("c0", SOURCE, 50, 4, good, bad)
    assert bool(titles(distortions=[one])) is warned


def lds(ours, low, baseline, ceiling):
    summary = [
        {"method": "scores", "kind": "scores", "proj_dim": 8, "lds": ours, "low": low, "high": 0.9},
        {"method": "gradient_dot", "kind": "baseline", "proj_dim": 8, "lds": baseline}
        | {"low": 0.0, "high": 0.5},
    ]
    if ceiling:
        summary.append(
            {"method": "noise_ceiling", "kind": "ceiling", "proj_dim": 0, "lds": ceiling}
            | {"low": 0.5, "high": 0.9}
        )
    return {"mine": Measured(SOURCE, {"summary": summary}, {"n_subsets": 100})}


def test_lds_is_read_against_its_ceiling():
    text = Page("".join(trust(facts(evaluations=lds(0.3, 0.2, 0.1, 0.6))))).text
    assert "LDS 0.3 , 95 % interval 0.2 to 0.9" in text
    assert "would reach about 0.6 (0.5 to 0.9)" in text
    assert "The scores reach 50 % of that" in text
    above = Page("".join(trust(facts(evaluations=lds(0.7, 0.2, 0.1, 0.6))))).text
    assert "too uncertain here to compare" in above
    without = Page("".join(trust(facts(evaluations=lds(0.3, 0.2, 0.1, None))))).text
    assert "How much could be reached at all is unknown" in without


def test_scores_that_predict_nothing_or_less_than_a_baseline_are_warned_of():
    assert titles(evaluations=lds(0.3, 0.2, 0.1, 0.6)) == []
    assert titles(evaluations=lds(0.3, -0.1, 0.1, 0.6)) == [
        "Experiment mine: the scores may predict nothing"
    ]
    assert titles(evaluations=lds(0.3, 0.2, 0.4, 0.6)) == [
        "Experiment mine: a simpler rule predicts better"
    ]


def tables(path, kind, attributes=None, **found):
    with create(path, kind, {}, {"code": "0", "torch": "7.7"}, **(attributes or {})) as writer:
        for key, rows in found.items():
            writer.table(key, pd.DataFrame(rows), [])
    return path


@pytest.fixture(scope="module")
def measured(results):
    """The page of a study with all measurements, whose numbers are made up."""
    folder = results
    rows = lds(0.31, 0.21, 0.11, 0.62)["mine"].tables["summary"]
    setting = {"loss_weight_power": 1.0, "combine": "product_of_averages", "proj_dim": 8}
    sweep = [
        {"damping": d, **setting, "lds": lds_, "lds_chosen_by": lds_, "lds_reported": lds_}
        for d, lds_ in ((0.5, 0.31), (2.0, 0.41))
    ]
    ends = {"low": 0.1, "high": 0.5}
    best = [
        {"setting": s, **{k: v for k, v in row.items() if k != "lds"}, **ends}
        for s, row in (("best", sweep[1]), ("config", sweep[0]))
    ]
    more = {
        "evaluations": [tables(
            folder / "evaluation/mine.h5",
            EVALUATION,
            {"n_subsets": 40, "n_seeds": 3, "n_targets": 4, "confidence": 0.95},
            summary=rows,
            targets=[{"method": m, "proj_dim": 8, "target_id": t, "correlation": c}
                     for m, c in (("scores", 0.25), ("noise_ceiling", 0.75))
                     for t in (*HOSTILE, "plain")],
            checkpoints=[{"n_checkpoints": n, "lds": 0.1 * n, "low": 0.0, "high": 0.5}
                         for n in (1, 2)],
            sweep=sweep,
            best=best,
        )],
        "counterfactuals": [tables(
            folder / "counterfactual/mine.h5",
            COUNTERFACTUAL,
            summary=[{"removed": r, "n_removed": n, "change": c, "low": c - 1, "high": c + 1}
                     for r, c in (("top", -3.5), ("random", -0.25)) for n in (5, 10)],
            targets=[{"removed": "top", "n_removed": 5, "target_id": "plain", "change": 1.0}],
        )],
        "mislabelled": [tables(
            folder / "mislabelled.h5",
            MISLABELLED,
            train=[{"id": "a", "flipped": 1}, {"id": "b", "flipped": 0}, {"id": "c", "flipped": 1}],
            detection=[{"method": "self_influence", "auc": 0.875, "found": 0.5}],
        )],
        "self_influence": [tables(
            folder / "self_influence.h5",
            SELF_INFLUENCE,
            train=[{"id": f"row-{i}", "label": i, "prediction": 1.5, "self_influence": i / 7}
                   for i in range(12)],
        )],
    }  # fmt: skip
    path = folder / "diagnostics/c0.h5"
    spec = {"checkpoint": {"id": "c0"}}
    with create(path, DIAGNOSTICS, spec, {}, n_streams=4) as writer:
        kinds, columns = ["squared_norm", "inner_product"], ["measured", "standard_error"]
        writer.matrix("agreement", kinds, [*columns, "predicted"])[:] = [
            [0.25, 0.01, 0.24],
            [0.125, 0.02, 0.13],
        ]
        for key in ("by_stream", "kernel", "predicted_sd"):
            writer.matrix(key, range(2), range(2))[:] = 1
        for key in ("projected_kernel", "projected_squared_norms"):
            writer.matrix(key, range(2), range(2))[:] = 1
        writer.vector("sample_ids", np.arange(2))
    return Page(write(results, diagnostics=[path], **more))


def test_measurements_stand_in_tables(measured):
    check_alone(measured)
    minus = "\N{MINUS SIGN}"
    assert measured.row("these scores") == ["0.310", "0.210", "0.900"]
    assert measured.row("ceiling: what a perfect method would reach, estimated")[0] == "0.620"
    assert measured.row("inner products of gradients")[0] == "0.110"
    assert measured.row("best of the sweep")[0] == "2"
    assert measured.row("this config")[4:6] == ["0.310", "0.310"]
    assert measured.row("those that the scores call most helpful")[1] == f"{minus}3.5"
    assert measured.row("self-influence") == ["0.875", "50 %"]
    assert "2 training examples got a wrong label" in measured.text
    assert measured.row("row-11") == ["11", "1.5", "1.57"]
    assert "row-1 " not in measured.text[measured.text.index("The largest; all are in") :]
    errors = ["25.00 % \N{PLUS-MINUS SIGN} 1.00 %", "24.00 %", "12.50 % \N{PLUS-MINUS SIGN} 2.00 %"]
    assert measured.row("c0")[:3] == errors
    assert "It was not measured" not in measured.text


def test_curves_are_drawn_and_described(measured):
    charts = {c["alt"]: c["src"] for c in measured.all("img") if "svg" in c["src"]}
    assert set(charts) == {
        "More checkpoints: LDS against checkpoints averaged",
        "Damping: LDS against damping, in mean squared feature norms",
        "Change of the model output: change of f against training examples removed",
        "Squared lengths: relative error, % against checkpoint, in the table's order",
        "Inner products, relative to both lengths: relative error, % against checkpoint, "
        "in the table's order",
    }
    for source in charts.values():
        svg = base64.b64decode(source.partition(",")[2]).decode()
        # Namespaces are names, not addresses that anything asks for.
        assert not re.search(r'(href|src)="(?!#)', svg)
