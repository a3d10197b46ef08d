"""How scores come from features where a config doesn't say. Pure functions, standard library only.

Source: docs/scores.md, "What each option changes" (the table of defaults).
"""

from typing import Any

from trak_core.model_outputs.table import TABLE
from trak_core.spec import Combine, Weighting


def usual_combine(*, along: bool) -> Combine:
    """Return how checkpoints come together: those from along runs, or ends of runs alone."""
    return Combine.UNIT_AVERAGE if along else Combine.PRODUCT_OF_AVERAGES


def usual_weighting(combine: str, model_output: str) -> Weighting:
    """Return how training samples weigh in the normal matrix."""
    by_unit = combine == Combine.UNIT_AVERAGE
    is_curved = by_unit and TABLE[model_output].weighs_by_curvature
    return Weighting.CURVATURE if is_curved else Weighting.PLAIN


def usual_power(combine: str, model_output: str) -> float:
    """Return the power of the loss weights."""
    if not TABLE[model_output].weight_is_probability:
        return 1
    return 0.75 if combine == Combine.UNIT_AVERAGE else 0.5


def fill_in_scoring(config: dict[str, Any], *, along: bool) -> str:
    """Fill in what the config doesn't say of scoring.

    Args:
        config: Changed in place.
        along: Whether checkpoints come from along runs.

    Returns:
        What was filled in, and why, in words; empty for nothing.
    """
    scoring, model_output = config["scoring"], config["model_output"]
    reasons = []
    if "combine" not in scoring:
        scoring["combine"] = str(usual_combine(along=along))
        whence = (
            "some checkpoints come from along a run"
            if along
            else "no run has several checkpoints, nor do they say different times"
        )
        reasons.append(f"combine is {scoring['combine']}, since {whence}")
    combine = scoring["combine"]
    if "weighting" not in scoring:
        scoring["weighting"] = str(usual_weighting(combine, model_output))
        reasons.append(
            f"weighting is {scoring['weighting']}, the default with {combine} of {model_output}"
        )
    if "loss_weight_power" not in scoring:
        scoring["loss_weight_power"] = usual_power(combine, model_output)
        is_probability = TABLE[model_output].weight_is_probability
        reasons.append(
            f"loss_weight_power is {scoring['loss_weight_power']}, the default with {combine} of "
            f"{model_output}, whose loss weight is {'a' if is_probability else 'no'} probability"
        )
    return "; ".join(reasons)
