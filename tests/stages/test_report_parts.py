"""Parts of the report: numbers, charts, warnings."""

import numpy as np
import pandas as pd
import pytest
from report_page import Page

from trak_core.attribution.model_fit import Fit
from trak_core.report.describe_samples import EACH
from trak_core.report.read_results import File, Results, n_trained_on, output_of
from trak_core.report.render import rendered, score_warnings, study_warnings
from trak_core.report.template_filters import fixed, number, percent, plural, signed
from trak_core.study.show_samples import readable


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(0), "0"),
        (number(-0.00344), "-0.00344"),
        (number(12.345), "12.3"),
        (number(123456.0), "123,456"),
        (number(2e7), "2e+07"),
        (signed(0.0123), "+0.012"),
        (signed(0.0), "0"),
        (signed(-4.56), "-4.6"),
        (percent(-0.001), "0\N{NO-BREAK SPACE}%"),
        # Not by NumPy's own rounding, which returns -20.0.
        (fixed(np.float64(-19.95), 1), "-19.9"),
        (plural(2000, "target"), "2,000 targets"),
    ],
)
def test_numbers_are_formatted(shown, text):
    assert shown == text.replace("-", "\N{MINUS SIGN}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("four", "four"),
        ("fives", "fiv ... s"),
        ("one\n\n\n\ntwo", "one ... o"),
        ("long prompt, then answer", "lon ... r"),
        ("\0" * 70 + "pad", "pad"),
        ("\0" * 90 + "pad", "pad"),
        ("a" * 500, "aaa ... a"),
        ("\ta", " ... a"),
    ],
)
def test_the_middle_of_a_long_text_is_left_out(text, shown):
    assert readable(text, 4) == shown


@pytest.mark.gate  # a run of Snakemake
def test_samples_of_several_experiments_are_compared(trained):
    """Samples that both pages show, the strongest first. Pandas is the oracle."""
    results, experiments = trained.path("results"), ("few", "one")
    page = Page((results / "report.html").read_text())
    files = [results / f"scores/{name}.h5" for name in experiments]
    tables = [pd.read_hdf(file, "train").set_index("id") for file in files]
    means = [(table["help"] - table["harm"]).astype(float) for table in tables]
    strength = sum(mean.abs() / mean.abs().max() for mean in means)
    seen = []
    for file, table in zip(files, tables, strict=True):
        top = pd.read_hdf(file, "top_influences")
        harm = table["harm"][table["harm"] > 0].nlargest(100)
        seen.append({*top.loc[top["rank"] <= EACH, "train_id"], *harm.index})
    order = strength.sort_values(ascending=False, kind="stable").index
    order = [i for i in order if i in seen[0] & seen[1]]
    ids = [a["id"] for name, a in page.elements if name == "tr" and "id" in a]
    assert ids == [f"train-{i}" for i in order][: len(ids)]
    assert len(ids) > 5
    links = [a["href"] for a in page.all("a") if "#train-" in a["href"]]
    section = page.text[page.text.rindex("Experiments side by side") :]
    for sample in order[: len(ids)]:
        row = section[section.index(f"train {sample} ") :]
        assert all(f"{signed(mean[sample])} help" in row for mean in means)
        assert {f"answers/{name}.html#train-{sample}" for name in experiments} & set(links)


def file(spec=(), tables=None, **attributes):
    """Return a made-up ``File``."""
    return File("scores/mine.h5", "hash", {}, dict(spec), tables or {}, attributes)


def results_of(
    n_checkpoints=10,
    saturated=0.0,
    right=1.0,
    sd=0.1,
    smallest=1.0,
    model_output="image_classification",
    lists=(),
    n_targets=8,
    n_copies=0,
    n_trained_on=0,
    **more,
):
    spec = {
        "experiment": "mine",
        "checkpoints": [
            {"id": f"c{i}", "sha256": str(max(i, n_copies))} for i in range(n_checkpoints)
        ],
        "runs": {f"c{i}": [f"c{i}"] for i in range(n_checkpoints)},
        "loss_weight_power": 1.0,
        "combine": "product_of_averages",
        "model_output": model_output,
        "projection": {"kind": "rademacher"},
        "normalize": False,
    }
    targets = pd.DataFrame([
        {"id": i, "output": float(i), "output_sd": sd} for i in range(n_targets)
    ])
    fit = Fit("", is_doubtful=right < 0.5)
    attributes = {"saturated": saturated, "fit": fit, "n_trained_on": n_trained_on}
    experiment = file(spec, {"targets": targets}, n_train=100, **attributes)
    spectrum = {"smallest": smallest, "largest": 1e3, "mean_squared_norm": 1.0}
    matrix = file({"checkpoint": {"id": "c0"}}, **spectrum)
    config = {"scoring": {"damping": 0}, "model_output": model_output}
    config |= {"experiments": {"mine": {}}, "lists": list(lists)}
    return Results(config=config, experiments=[experiment], matrices=[matrix], **more)


def lds(ours, low, baseline, ceiling):
    rows = [
        ("scores", "scores", ours, low, 0.9),
        ("gradient_dot", "baseline", baseline, 0.0, 0.5),
        ("noise_ceiling", "ceiling", ceiling, 0.5, 0.9),
    ]
    summary = pd.DataFrame(rows, columns=["method", "kind", "lds", "low", "high"]).dropna()
    summary = summary.assign(behind=ours - summary["lds"], behind_low=-0.1, behind_high=0.4)
    return {"mine": file(tables={"summary": summary}, n_subsets=100, part_kept=0.5, n_seeds=1)}


def warned(**numbers):
    """Return the section of warnings as a page."""
    results = results_of(**numbers)
    (experiment,) = results.experiments
    given = {
        "results": results,
        "output": output_of(experiment),
        "fit": experiment.attributes["fit"],
    }
    page = Page(rendered("warnings", warnings=study_warnings(results), **given))
    assert page.closed_in_order
    return page


def titles(**numbers):
    return warned(**numbers).headings


def test_a_study_without_warnings():
    assert titles(lists=["drop"]) == titles(lists=["suspects"], n_targets=100) == []
    of_numbers = {"saturated": 1.0, "model_output": "regression"}  # small residuals
    assert titles() == titles(**of_numbers) == []


@pytest.mark.parametrize(
    ("change", "title", "also_of_scores"),
    [
        ({"right": 0.49}, "The models predict their training samples badly", True),
        ({"n_checkpoints": 4}, "Few checkpoints", True),
        ({"saturated": 0.51}, "Saturated loss weights", True),
        ({"smallest": 0.9e-3}, "Near-singular matrices", False),
        ({"smallest": 0.0}, "Near-singular matrices", False),
        ({"sd": 2.3}, "The checkpoints disagree", True),
        ({"n_copies": 1}, "Checkpoints that are the same", True),
        ({"sd": 0.0}, "Checkpoints that are the same", True),
        ({"n_trained_on": 5}, "Targets that were trained on", True),
        (
            {"lists": ["suspects"], "n_targets": 99},
            "Suspects from 99 targets: the order is uncertain",
            False,
        ),
    ],
)
def test_each_change_has_one_warning(change, title, also_of_scores):
    """The page of an experiment has the warnings that depend on scores only."""
    assert titles(**change) == [title]
    results = results_of(**change)
    of_scores = score_warnings(results.experiments[0])
    assert of_scores == (study_warnings(results) if also_of_scores else [])


@pytest.mark.parametrize(
    ("ids", "outputs", "labels", "n"),
    [
        ([2, 0], [0.3 + 1e-5, 0.1], [1, 0], 2),
        ([2, 0], [0.3, 0.2], [1, 0], 1),  # equal ids by chance
        ([2, 0], [0.3, 0.1], [0, 0], 1),
        (["2", "x"], [0.3, 0.1], [1, 0], 0),
    ],
)
def test_targets_that_are_training_samples_are_counted(ids, outputs, labels, n):
    train = pd.DataFrame({"id": [0, 1, 2], "label": [0, 1, 1], "output": [0.1, 0.2, 0.3]})
    targets = pd.DataFrame({"id": ids, "label": labels, "output": outputs})
    assert n_trained_on(targets, train) == n


@pytest.mark.parametrize(
    ("ours", "ceiling", "low", "high", "share"),
    [
        (0.3, 0.6, 0.5, 0.9, "50 %"),
        (0.7, 0.6, 0.5, 0.9, None),
        (0.3, None, None, None, None),
        # The interval includes 0, or is wider than the ceiling.
        (0.3, 0.6, -0.1, 0.4, None),
        (0.3, 0.6, 0.1, 0.75, None),
    ],
)
def test_the_share_of_the_ceiling_is_shown_if_it_is_known(ours, ceiling, low, high, share):
    evaluations = lds(ours, 0.2, 0.1, ceiling)
    summary = evaluations["mine"].tables["summary"]
    summary.loc[summary["kind"] == "ceiling", ["low", "high"]] = low, high
    evaluations["mine"].attributes["n_seeds"] = 2
    text = Page(rendered("trust", results=results_of(evaluations=evaluations))).text
    assert ("training ignores its seed" in text) == (ceiling is None)
    assert f"LDS {ours:.2f} , 95 % interval 0.20 to 0.90" in text
    assert ("perfect method would reach about 0.60" in text) == (ceiling is not None)
    assert ("The scores reach" in text) == bool(share)
    assert not share or f"The scores reach {share} of this ceiling" in text


@pytest.mark.parametrize(
    ("low", "baseline", "warnings"),
    [(0.2, 0.1, []), (-0.1, 0.1, ["may predict nothing"]), (0.2, 0.4, ["a simpler rule predicts"])],
)
def test_scores_that_predict_too_little_have_a_warning(low, baseline, warnings):
    headings = titles(evaluations=lds(0.3, low, baseline, 0.6))
    assert len(headings) == len(warnings)
    for heading, warning in zip(headings, warnings, strict=True):
        assert heading.startswith(f"Experiment mine: {'the scores ' if low < 0 else ''}{warning}")
