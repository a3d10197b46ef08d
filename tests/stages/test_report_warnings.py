"""What a report warns of, and how it reads an LDS."""

import pytest
from report_page import Page
from reported import SOURCE, facts, lds

from trak_core.report.facts import Distortion, Error
from trak_core.report.render import rendered
from trak_core.report.warnings import study_warnings


def warned(**given):
    """The section with the warnings."""
    return Page(rendered("warnings", warnings=study_warnings(facts(**given))))


def titles(**given):
    found = warned(**given)
    assert found.closed_in_order
    return found.headings


def trust(evaluations):
    return Page(rendered("trust", facts=facts(evaluations=evaluations))).text


def test_nothing_to_warn_of():
    assert titles() == []
    assert "None. These were looked for, and not found: fewer than 5" in warned().text


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


def test_small_residuals_are_no_warning():
    assert titles(saturated=1.0, model_output="regression") == []


def test_a_saturated_study_with_a_power_below_one_gets_other_advice():
    plain, lifted = (warned(saturated=0.9, power=p).text for p in (1.0, 0.5))
    assert "What to do: Set scoring.loss_weight_power to 0.5" in plain
    assert "is 0.5 already" in lifted


@pytest.mark.parametrize(("measured", "warned"), [(0.11, False), (0.2, True), (0.05, False)])
def test_a_projection_that_distorts_too_much(measured, warned):
    good, bad = Error(0.1, 0.01, 0.1), Error(measured, 0.01, 0.1)
    one = Distortion("c0", SOURCE, 50, 4, good, bad)
    assert bool(titles(distortions=[one])) is warned


def test_lds_is_read_against_its_ceiling():
    text = trust(lds(0.3, 0.2, 0.1, 0.6))
    assert "LDS 0.30 , 95 % interval 0.20 to 0.90" in text
    assert "would reach about 0.60 (0.50 to 0.90)" in text
    assert "The scores reach 50 % of that" in text
    above = trust(lds(0.7, 0.2, 0.1, 0.6))
    assert "too uncertain here to compare" in above
    without = trust(lds(0.3, 0.2, 0.1, None))
    assert "How much could be reached at all is unknown" in without


def test_scores_that_predict_nothing_or_less_than_a_baseline_are_warned_of():
    assert titles(evaluations=lds(0.3, 0.2, 0.1, 0.6)) == []
    assert titles(evaluations=lds(0.3, -0.1, 0.1, 0.6)) == [
        "Experiment mine: the scores may predict nothing"
    ]
    assert titles(evaluations=lds(0.3, 0.2, 0.4, 0.6)) == [
        "Experiment mine: a simpler rule predicts better"
    ]
