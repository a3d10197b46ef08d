"""What may mislead readers of this study's scores; templates/warnings/ has the words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, pstdev
from typing import Any

from trak_core.config.complete_config import lists_of
from trak_core.report.read import NEAR_ZERO, Results, condition_number, output_of, rows_with
from trak_core.scoring.lists import ENOUGH_TARGETS, few_targets
from trak_core.spec import Combine

# Fewer checkpoints are few; with a larger condition number rounding may show in a score's second
# digit, since features are float32, right to 6e-8.
LIMITS = {
    **{"right": 0.5, "checkpoints": 5, "loss_weight": NEAR_ZERO, "condition": 1e6},
    "targets": ENOUGH_TARGETS,
}
# Fewer targets than this hardly tell how far targets differ.
_ENOUGH_TARGETS = 8
# A measured error is above theory's by so many standard errors, and by such a part.
_STANDARD_ERRORS, _EXCESS = 4, 0.1


@dataclass(frozen=True, slots=True)
class StudyWarning:
    """One warning: the name of the template that words it, and what that shows."""

    name: str
    shown: Mapping[str, Any] = field(default_factory=dict)


def study_warnings(results: Results) -> list[StudyWarning]:
    """Return what may mislead, most consequential first."""
    first = (_predictions, _lds, _suspects, _checkpoints)
    kinds = (*first, _loss_weights, _matrices, _projection, _disagreement)
    return [warning for kind in kinds for warning in kind(results)]


def _predictions(results: Results) -> list[StudyWarning]:
    """Look whether the models know their own training data."""
    right = results.experiments[0].attributes["right"]
    if right >= LIMITS["right"] or not output_of(results.experiments[0]).labels_are_classes:
        return []
    return [StudyWarning("wrong_predictions", {"right": right})]


def _lds(results: Results) -> list[StudyWarning]:
    warnings = []
    for name, evaluation in results.evaluations.items():
        scores = evaluation.row("summary", kind="scores")
        shown = {"experiment": name, "scores": scores}
        if scores.low <= 0:
            warnings.append(StudyWarning("predicts_nothing", shown))
        baselines = rows_with(evaluation.tables["summary"], kind="baseline")
        better = [row for row in baselines if row.lds > scores.lds]
        # Ends of runs are these scores with fewer checkpoints, which chance alone may have ahead.
        better = [row for row in better if row.method != "ends_of_runs" or row.behind_high < 0]
        if better:
            warnings.append(StudyWarning("simpler_rule", shown | {"better": better}))
    return warnings


def _suspects(results: Results) -> list[StudyWarning]:
    """Look whether a list of suspects rests on enough targets."""
    named = lists_of(results.config).get("suspects", {}).get("experiment")
    files = (file for file in results.experiments if file.spec["experiment"] == named)
    tables = [file.tables["targets"] for file in files]
    few = [len(targets) for targets in tables if few_targets(targets)]
    return [StudyWarning("few_targets", {"n": n, "exact": results.exact}) for n in few]


def _checkpoints(results: Results) -> list[StudyWarning]:
    n = len(results.spec["checkpoints"])
    return [StudyWarning("few_checkpoints", {"n": n})] if n < LIMITS["checkpoints"] else []


def _loss_weights(results: Results) -> list[StudyWarning]:
    saturated = results.experiments[0].attributes["saturated"]
    # A residual is in a unit that no limit here can know.
    if saturated <= 0.5 or not output_of(results.experiments[0]).weight_is_probability:
        return []
    along = results.spec["combine"] == Combine.UNIT_AVERAGE
    shown = {"part": saturated, "power": results.spec["loss_weight_power"], "along": along}
    return [StudyWarning("saturated", shown)]


def _matrices(results: Results) -> list[StudyWarning]:
    damping = results.config["scoring"]["damping"]
    conditions = [(condition_number(m, damping), m) for m in results.matrices]
    bad = [pair for pair in conditions if pair[0] > LIMITS["condition"]]
    if not bad:
        return []
    condition, matrix = max(bad, key=lambda pair: pair[0])
    checkpoint = matrix.spec["checkpoint"]["id"]
    shown = {"n": len(bad), "condition": condition, "checkpoint": checkpoint}
    return [StudyWarning("near_singular", shown)]


def _projection(results: Results) -> list[StudyWarning]:
    """Compare what projections do with what theory says they do."""
    bad = []
    for file in results.distortions:
        for error in rows_with(file.tables["agreement"]):
            allowed = max(_STANDARD_ERRORS * error.standard_error, _EXCESS * error.predicted)
            if error.measured - error.predicted > allowed:
                bad.append(file.spec["checkpoint"]["id"])
    return [StudyWarning("distortion", {"checkpoints": list(dict.fromkeys(bad))})] if bad else []


def _disagreement(results: Results) -> list[StudyWarning]:
    """Compare how far ends of runs differ on a target with how far targets differ."""
    targets = [row for file in results.experiments for row in rows_with(file.tables["targets"])]
    if len(results.spec["runs"]) < 2 or len(targets) < _ENOUGH_TARGETS:
        return []
    within = sqrt(fmean(target.output_sd**2 for target in targets))
    between = pstdev(target.output for target in targets)
    if within <= between:
        return []
    return [StudyWarning("disagreement", {"within": within, "between": between})]
