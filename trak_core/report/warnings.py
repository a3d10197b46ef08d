"""What in this study asks for care, each with what to do about it."""

from dataclasses import dataclass
from math import sqrt
from statistics import fmean, pstdev

from trak_core.model_outputs.table import TABLE
from trak_core.report.elements import (
    Html,
    bullets,
    element,
    joined,
    number,
    paragraph,
    percent,
    plural,
)
from trak_core.report.facts import Facts

_FEW_CHECKPOINTS = 5
SATURATED = 1e-3
# Features are float32, right to 6e-8: past this, rounding may show in a score's second digit.
_CONDITION = 1e6
# Fewer targets than this hardly tell how far targets differ.
_ENOUGH_TARGETS = 8
# A measured error is above theory's by so many standard errors, and by such a part.
_STANDARD_ERRORS, _EXCESS = 4, 0.1


@dataclass(frozen=True, slots=True)
class Caution:
    """One warning.

    Attributes:
        title: In a few words.
        found: What was found.
        remedy: What to do.
    """

    title: str
    found: str
    remedy: str


def cautions(facts: Facts) -> list[Caution]:
    """Return what asks for care, most consequential first."""
    looks = (_lds, _checkpoints, _loss_weights, _matrices, _projection, _disagreement)
    return [caution for look in looks for caution in look(facts)]


def _lds(facts: Facts) -> list[Caution]:
    found = []
    for name, measured in facts.evaluations.items():
        summary = measured.tables["summary"]
        ours = measured.row("summary", kind="scores")
        assert ours is not None
        if ours["low"] <= 0:
            found.append(
                Caution(
                    f"Experiment {name}: the scores may predict nothing",
                    f"The LDS is {number(ours['lds'])}, and its 95 % interval, "
                    f"{number(ours['low'])} to {number(ours['high'])}, holds 0.",
                    "Don't rely on these scores. Take more checkpoints, try another damping "
                    "(evaluation.sweep shows which), and more subsets for a narrower interval.",
                )
            )
        better = [r for r in summary if r["kind"] == "baseline" and r["lds"] > ours["lds"]]
        if better:
            found.append(
                Caution(
                    f"Experiment {name}: a simpler rule predicts better",
                    f"The LDS of the scores is {number(ours['lds'])}; that of "
                    + ", ".join(
                        f"{r['method'].replace('_', ' ')} is {number(r['lds'])}" for r in better
                    )
                    + ".",
                    "The intervals in the evaluation section say how sure that is. Look at the "
                    "settings that it compares, and at the number of checkpoints.",
                )
            )
    return found


def _checkpoints(facts: Facts) -> list[Caution]:
    n = len(facts.checkpoints)
    if n >= _FEW_CHECKPOINTS:
        return []
    return [
        Caution(
            "Few checkpoints",
            f"These scores are averages over {plural(n, 'checkpoint')}. One checkpoint's "
            "gradients are mostly its own chance; what training examples do in general only "
            "shows in an average.",
            "Add checkpoints: ten are a good start, and some from along one training run will do. "
            "Features of those that are there stay as they are.",
        )
    ]


def _loss_weights(facts: Facts) -> list[Caution]:
    experiment = facts.experiments[0]
    part = experiment.saturated
    if part <= 0.5 or not TABLE[facts.config["model_output"]].weight_is_probability:
        return []
    power = experiment.source.spec["loss_weight_power"]
    return [
        Caution(
            "Saturated loss weights",
            f"{percent(part)} of the training examples have a loss weight below {SATURATED:g}: the "
            "models fit them almost exactly, so that their scores are near 0 whatever they taught.",
            "Set scoring.loss_weight_power to 0.5, or take checkpoints from earlier in training."
            if power == 1
            else f"scoring.loss_weight_power is {power} already, which softens it; checkpoints "
            "from earlier in training would do more.",
        )
    ]


def _matrices(facts: Facts) -> list[Caution]:
    damping = facts.config["scoring"]["damping"]
    bad = [(m.checkpoint, m.condition(damping)) for m in facts.matrices]
    bad = sorted((one for one in bad if one[1] > _CONDITION), key=lambda one: -one[1])
    if not bad:
        return []
    return [
        Caution(
            "Near-singular matrices",
            f"The damped normal matrix of {plural(len(bad), 'checkpoint')} has a condition number "
            f"above {_CONDITION:.0e}, at worst {number(bad[0][1], 2)} ({bad[0][0]}): rounding of "
            "the features grows by up to that factor on the way to a score.",
            "Raise scoring.damping (2 is a good start), or take a smaller projection.proj_dim.",
        )
    ]


def _projection(facts: Facts) -> list[Caution]:
    """Compare what projections do with what theory says they do."""
    bad = [
        one.checkpoint
        for one in facts.distortions
        for error in (one.squared_norm, one.inner_product)
        if error.measured - error.predicted
        > max(_STANDARD_ERRORS * error.standard_error, _EXCESS * error.predicted)
    ]
    if not bad:
        return []
    return [
        Caution(
            "The projection distorts more than it should",
            f"Under {', '.join(dict.fromkeys(bad))} errors of lengths or inner products are above "
            "what theory predicts, by more than chance explains.",
            "Take `projection: {kind: rademacher}` or `normal`, whose errors are known exactly; a "
            "larger proj_dim makes all of them smaller.",
        )
    ]


def _disagreement(facts: Facts) -> list[Caution]:
    """Compare how far checkpoints differ on a target with how far targets differ."""
    targets = [about for one in facts.experiments for about in one.targets]
    if len(facts.checkpoints) < 2 or len(targets) < _ENOUGH_TARGETS:
        return []
    within = sqrt(fmean(about["output_sd"] ** 2 for about in targets))
    between = pstdev(about["output"] for about in targets)
    if within <= between:
        return []
    return [
        Caution(
            "The checkpoints disagree",
            f"The model output of a target varies by {number(within, 2)} from checkpoint to "
            f"checkpoint, but by only {number(between, 2)} from target to target (standard "
            "deviations): the checkpoints are rather different models.",
            "Scores then describe what such models have in common. Make sure that all checkpoints "
            "come from the same training set and are trained far enough, and take more of them.",
        )
    ]


def warnings_section(found: list[Caution]) -> Html:
    """Return the warnings, or what was looked for and not found."""
    if found:
        return joined(
            element(
                "div",
                element("h4", one.title),
                paragraph(one.found),
                paragraph(element("b", "What to do: "), one.remedy),
                class_="warning",
            )
            for one in found
        )
    looked_for = [
        f"fewer than {_FEW_CHECKPOINTS} checkpoints",
        f"most training examples with a loss weight below {SATURATED:g}",
        f"normal matrices with a condition number above {_CONDITION:.0e}, damping included",
        "model outputs that differ more between checkpoints than between targets",
        "where the projection was measured: larger errors than theory predicts",
        "where trust was measured: scores that predict nothing, or less than a simple rule",
    ]
    return joined([
        paragraph("None. These were looked for, and not found:"),
        bullets(looked_for),
    ])
