"""A report on a study with all its measurements: their tables and curves."""

import base64
import re

import numpy as np
import pandas as pd
import pytest
from report_page import Page
from reported import HOSTILE, check_alone, finished, lds, write

from trak_core.artifacts import (
    DISTORTION,
    EVALUATION,
    FLIPPED,
    REMOVALS,
    SCORES,
    SELF_INFLUENCE,
    create,
    open_artifact,
)
from trak_core.errors import InputError


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("report"))


def tables(path, kind, attributes=None, spec=(), **found):
    made_by = {"code": "0", "torch": "7.7"}
    with create(path, kind, dict(spec), made_by, **(attributes or {})) as writer:
        for key, rows in found.items():
            writer.table(key, pd.DataFrame(rows), [])
    return path


@pytest.fixture(scope="module")
def measured(results):
    """The page of a study with all measurements, whose numbers are made up."""
    folder = results
    with open_artifact(folder / "scores/mine.h5", SCORES) as file:
        spec = {"scores": file.content_hash, "weighting": "plain"}
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
            spec,
            summary=rows,
            targets=[{"method": m, "proj_dim": 8, "target_id": t, "correlation": c}
                     for m, c in (("scores", 0.25), ("noise_ceiling", 0.75))
                     for t in (*HOSTILE, "plain")],
            checkpoints=[{"n_checkpoints": n, "lds": 0.1 * n, "low": 0.0, "high": 0.5}
                         for n in (1, 2)],
            sweep=sweep,
            best=best,
        )],
        "removals": [tables(
            folder / "removals/mine.h5",
            REMOVALS,
            spec=spec,
            summary=[{"removed": r, "n_removed": n, "change": c, "low": c - 1, "high": c + 1}
                     for r, c in (("top", -3.5), ("random", -0.25), ("difference", -3.25))
                     for n in (5, 10)],
            targets=[{"removed": "top", "n_removed": 5, "target_id": "plain", "change": 1.0}],
        )],
        "flipped": [tables(
            folder / "flipped.h5",
            FLIPPED,
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
    path = folder / "distortion/c0.h5"
    spec = {"checkpoint": {"id": "c0"}}
    with create(path, DISTORTION, spec, {}, n_streams=4) as writer:
        kinds, columns = ["squared_norm", "inner_product"], ["measured", "standard_error"]
        writer.matrix("agreement", kinds, [*columns, "predicted"])[:] = [
            [0.25, 0.01, 0.24],
            [0.125, 0.02, 0.13],
        ]
        writer.vector("sample_ids", np.arange(2))
    return Page(write(results, distortion=[path], **more))


def test_measurements_stand_in_tables(measured):
    check_alone(measured)
    minus = "\N{MINUS SIGN}"
    assert measured.row("these scores") == ["0.310", "0.210", "0.900", "", "", ""]
    assert measured.row("ceiling: what a perfect method would reach, estimated")[0] == "0.620"
    beside = ["0.110", "0.000", "0.500", "0.200", f"{minus}0.100", "0.400"]
    assert measured.row("inner products of gradients") == beside
    assert measured.row("best of the sweep")[0] == "2"
    assert measured.row("this config")[4:6] == ["0.310", "0.310"]
    assert measured.row("those that the scores call most helpful")[1] == f"{minus}3.5"
    assert measured.row("the most helpful, beyond random ones")[1] == f"{minus}3.25"
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


def test_measurements_of_other_scores_are_refused(results):
    for kind, key in ((EVALUATION, "evaluations"), (REMOVALS, "removals")):
        some = {table: [{"a": 1}] for table in kind.keys}
        other = tables(results / "other/mine.h5", kind, spec={"scores": "another"}, **some)
        found = r"other/mine\.h5 must be about the scores in scores/mine\.h5.*Found another"
        with pytest.raises(InputError, match=found):
            write(results, **{key: [other]})
