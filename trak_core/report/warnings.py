"""What in this study asks for care; what to say of each stands in templates/warnings/."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from trak_core.model_outputs.table import TABLE
from trak_core.report.facts import Facts
from trak_core.spec import Combine

# Fewer checkpoints are few; a loss weight below is near 0; with a condition number above, rounding
# may show in a score's second digit, since features are float32, right to 6e-8.
LIMITS = {"checkpoints": 5, "loss_weight": 1e-3, "condition": 1e6}
# Fewer targets than this hardly tell how far targets differ.
_ENOUGH_TARGETS = 8
# A measured error is above theory's by so many standard errors, and by such a part.
_STANDARD_ERRORS, _EXCESS = 4, 0.1


@dataclass(frozen=True, slots=True)
class StudyWarning:
    """One warning.

    Attributes:
        name: Of the template that words it.
        shown: What the template shows: names and numbers.
    """

    name: str
    shown: Mapping[str, Any] = field(default_factory=dict)


def study_warnings(facts: Facts) -> list[StudyWarning]:
    """Return what asks for care, most consequential first."""
    looks = (_lds, _checkpoints, _loss_weights, _matrices, _projection, _disagreement)
    return [warning for look in looks for warning in look(facts)]


def _lds(facts: Facts) -> list[StudyWarning]:
    found = []
    for name, measured in facts.evaluations.items():
        scores = measured.row("summary", kind="scores")
        assert scores is not None
        shown = {"experiment": name, "scores": scores}
        if scores["low"] <= 0:
            found.append(StudyWarning("predicts_nothing", shown))
        simple = [row for row in measured.tables["summary"] if row["kind"] == "baseline"]
        better = [row for row in simple if row["lds"] > scores["lds"]]
        # No rule but these scores with fewer checkpoints: chance alone may have it ahead.
        better = [r for r in better if r["method"] != "ends_of_runs" or r["behind_high"] < 0]
        if better:
            found.append(StudyWarning("simpler_rule", shown | {"better": better}))
    return found


def _checkpoints(facts: Facts) -> list[StudyWarning]:
    n = len(facts.checkpoints)
    return [StudyWarning("few_checkpoints", {"n": n})] if n < LIMITS["checkpoints"] else []


def _loss_weights(facts: Facts) -> list[StudyWarning]:
    experiment = facts.experiments[0]
    # A residual is in a unit that no bound here can know.
    if experiment.saturated <= 0.5 or not TABLE[facts.config["model_output"]].weight_is_probability:
        return []
    power = experiment.source.spec["loss_weight_power"]
    along = experiment.source.spec["combine"] == Combine.UNIT_AVERAGE
    shown = {"part": experiment.saturated, "power": power, "along": along}
    return [StudyWarning("saturated", shown)]


def _matrices(facts: Facts) -> list[StudyWarning]:
    found = [(matrix.condition(facts.damping), matrix.checkpoint) for matrix in facts.matrices]
    bad = [one for one in found if one[0] > LIMITS["condition"]]
    if not bad:
        return []
    condition, checkpoint = max(bad, key=lambda one: one[0])
    shown = {"n": len(bad), "condition": condition, "checkpoint": checkpoint}
    return [StudyWarning("near_singular", shown)]


def _projection(facts: Facts) -> list[StudyWarning]:
    """Compare what projections do with what theory says they do."""
    bad = [
        one.checkpoint
        for one in facts.distortions
        for error in (one.squared_norm, one.inner_product)
        if error.measured - error.predicted
        > max(_STANDARD_ERRORS * error.standard_error, _EXCESS * error.predicted)
    ]
    return [StudyWarning("distortion", {"checkpoints": list(dict.fromkeys(bad))})] if bad else []


def _disagreement(facts: Facts) -> list[StudyWarning]:
    """Compare how far ends of runs differ on a target with how far targets differ."""
    targets = [about for one in facts.experiments for about in one.targets]
    if facts.n_runs < 2 or len(targets) < _ENOUGH_TARGETS:
        return []
    within = sqrt(fmean(about["output_sd"] ** 2 for about in targets))
    between = pstdev(about["output"] for about in targets)
    if within <= between:
        return []
    return [StudyWarning("disagreement", {"within": within, "between": between})]
