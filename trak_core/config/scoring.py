"""How scores come from features where a config doesn't say. Pure functions, standard library only.

Source: spec of the scores, "The formula" (the table of defaults).
"""

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
