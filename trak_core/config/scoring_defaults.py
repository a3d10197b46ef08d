"""Fill in scoring settings whose defaults depend on other settings.

The functions ``features_spec`` and ``scores_spec`` then collect all settings on which features and
scores depend.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trak_core.model_outputs.about_outputs import about_output, output_name
from trak_core.settings import Combine, FeaturesSpec, ScoresSpec, Weighting, curvature_power


def usual_combine(*, several_times: bool) -> Combine:
    """Return the default ``combine``.

    ``several_times`` is true if the checkpoints were saved at several times during training.
    """
    return Combine.UNIT_AVERAGE if several_times else Combine.PRODUCT_OF_AVERAGES


def usual_weighting(combine: str, model_output: str | Mapping[str, str]) -> Weighting:
    """Return the default weighting of training samples in the normal matrix."""
    is_curved = combine == Combine.UNIT_AVERAGE and about_output(model_output).weighs_by_curvature
    return Weighting.CURVATURE if is_curved else Weighting.PLAIN


def usual_power(combine: str, model_output: str | Mapping[str, str]) -> float:
    """Return the default power to which loss weights are raised."""
    if not about_output(model_output).weight_is_probability:
        return 1
    return 0.75 if combine == Combine.UNIT_AVERAGE else 0.5


def fill_in_scoring(config: dict[str, Any], *, several_times: bool) -> str:
    """Add the defaults of missing scoring settings to a config.

    Args:
        config: The config, which is changed.
        several_times: Whether the checkpoints were saved at several times during training.

    Returns:
        A text that lists the added settings, and for each of them the reason for its default.
    """
    scoring, model_output = config["scoring"], config["model_output"]
    reasons = []
    scoring.setdefault("damping", 2)
    if "combine" not in scoring:
        scoring["combine"] = str(usual_combine(several_times=several_times))
        reason = "each run has one checkpoint, and their times do not differ"
        reason = "checkpoints are from different times of training" if several_times else reason
        reasons.append(f"combine is {scoring['combine']}, because {reason}")
    combine = scoring["combine"]
    usual = f"the default for {combine} and {output_name(model_output)}"
    if "weighting" not in scoring and config.get("label_draws"):
        scoring["weighting"] = str(Weighting.PLAIN)
        reasons.append(f"weighting is {Weighting.PLAIN}, as label_draws allows no other value")
    if "weighting" not in scoring:
        scoring["weighting"] = str(usual_weighting(combine, model_output))
        reasons.append(f"weighting is {scoring['weighting']}, {usual}")
    if "loss_weight_power" not in scoring:
        scoring["loss_weight_power"] = usual_power(combine, model_output)
        article = "a" if about_output(model_output).weight_is_probability else "not a"
        reasons.append(
            f"loss_weight_power is {scoring['loss_weight_power']}, {usual}, where the loss weight "
            f"is {article} probability"
        )
    return "; ".join(reasons)


def features_spec(
    config: Mapping[str, Any], study_digest: str, state_dicts: Mapping[str, str]
) -> FeaturesSpec:
    """Return the settings of features, or of Gramians, that are the same for all checkpoints."""
    patterns, projection = config["parameters"], config["projection"]
    is_projected = not isinstance(projection, str)
    return FeaturesSpec(
        model_output=output_name(config["model_output"]),
        parameter_patterns=None if patterns == "all" else patterns,
        projection=projection if is_projected else {"kind": projection},
        dtype=config["features_dtype"] if is_projected else "float64",
        study_digest=study_digest,
        preconditioner=None if config["preconditioner"] == "none" else "adam",
        state_dicts=state_dicts or None,
        label_draws=config.get("label_draws", 0),
        precision=config["compute"]["precision"],
    )


def scores_spec(
    config: Mapping[str, Any], features: FeaturesSpec, runs: Mapping[str, Sequence[str]]
) -> ScoresSpec:
    """Return the settings of self-influences. An experiment's scores also depend on its targets."""
    scoring, about = config["scoring"], about_output(config["model_output"])
    power, weighting = scoring["loss_weight_power"], scoring["weighting"]
    is_probability = about.weight_is_probability
    return ScoresSpec(
        features=features,
        damping=scoring["damping"],
        weighting=weighting,
        curvature_power=curvature_power(weighting, power, is_probability=is_probability),
        norm_power=power if scoring["combine"] == Combine.UNIT_AVERAGE else None,
        normalize=scoring["normalize"],
        runs=runs,
        combine=scoring["combine"],
        loss_weight_power=power,
    )
