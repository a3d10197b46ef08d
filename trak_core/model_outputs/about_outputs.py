"""The table of the model outputs that a config can name, with descriptions for reports.

If you add a model output to the table, also add its name to the config's schema, and a line to
``config/README.md``. Both are checked by ``tests/library/test_registries.py``. Snakemake imports
this module at every start, which must be fast. Therefore, only ``load`` imports torch.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trak_core.model_outputs.model_output import ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A description of a model output f for reports, and properties that the pipeline must know.

    Attributes:
        name: The name of f, with an article.
        unit: The unit of f.
        meaning: The meaning of a larger f: the end of a sentence that begins "the larger f, ".
        label: A word for the column ``label`` of tables. Empty if the column has no meaning.
        prediction: A word for the column ``prediction``. Empty if the column has no meaning.
        columns: A one-line explanation of the columns ``label`` and ``prediction``.
        raises: A name for the quantity that training samples with positive scores raise. Empty if
            a larger f is always better.
        better: ``larger`` if the loss is smaller for a larger f, or ``closer`` if it is smaller for
            an f closer to the label. Empty if this is unknown.
        place: The module that defines the model output, and the name in this module, such as
            ``supervised.LOSS``. Empty for a user-defined function.
        labels_are_classes: Whether the label of a sample is one of several classes.
        counts_parts: Whether the column ``label`` contains the number of a sample's labelled parts,
            such as tokens, and ``prediction`` the number of parts that are predicted correctly.
        weight_is_probability: Whether the loss weight is a probability or a mean of probabilities.
            It is then close to 0 for confident samples.
        weighs_by_curvature: Whether the normal matrix is by default weighted by the curvature if
            checkpoints are from several steps of a run. False if the loss is not a function of f,
            and for texts, whose curvatures p (1 - p) may differ by factors such as e^100.
        has_loss_noise: Whether ``ModelOutput.loss_noise`` is defined, which `label_draws` needs.
        needs_pairs: Whether f compares a sample with other samples drawn from the training data.
    """

    name: str
    unit: str
    meaning: str
    label: str = "label"
    prediction: str = "predicted"
    columns: str = "label: the sample's own label; prediction: the label that the model predicts"
    raises: str = ""
    better: Literal["larger", "closer", ""] = "larger"
    place: str
    labels_are_classes: bool = False
    counts_parts: bool = False
    weight_is_probability: bool
    weighs_by_curvature: bool = False
    has_loss_noise: bool = False
    needs_pairs: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the model output is a user-defined function."""
        return not self.place

    @property
    def sides(self) -> tuple[str, str]:
        """Headings for training samples with positive and with negative scores."""
        if self.raises:
            return f"Raise {self.raises} most", f"Lower {self.raises} most"
        return "Most helpful: push f up", "Most harmful: push f down"

    @property
    def verdicts(self) -> tuple[str, str]:
        """Suffixes for both headings in ``sides``. They say whether the scores are good or bad."""
        if self.better == "closer":
            return " (good where f is below the label)", " (good where f is above the label)"
        neither = "", ". Neither is good or bad by itself"
        return neither if self.raises else (" (helpful)", " (harmful)")

    @property
    def effects(self) -> tuple[str, str]:
        """Verb phrases for the effects of helpful and of harmful training samples on a target."""
        if self.better == "closer":
            return "bring f closer to the label", "take f away from the label"
        return "push f up", "push f down"

    @property
    def worst_fitted(self) -> str:
        """A phrase for the order in which the samples that the model fits worst come first."""
        is_distance = self.better == "closer"
        return "size of loss_weight, largest first" if is_distance else "output, lowest first"

    def load(self, *others: Any) -> "ModelOutput":
        """Return the model output. For CLIP, ``others`` are the arguments of ``clip.contrast``."""
        module, name = self.place.split(".")
        output = getattr(importlib.import_module(f"trak_core.model_outputs.{module}"), name)
        return output(*others) if self.needs_pairs else output


_LOG_ODDS = (
    "log-odds, log(p / (1 - p)): 0 is a coin toss, +3 means p = 95 %, \N{MINUS SIGN}3 means 5 %"
)
_LABEL = About(
    name="the log-odds of the label",
    unit=_LOG_ODDS,
    meaning="the more certain the model is of the sample's own label",
    place="supervised.CLASSIFICATION",
    labels_are_classes=True,
    weight_is_probability=True,
    weighs_by_curvature=True,
    has_loss_noise=True,
)


def _of_parts(parts: str, **fields: Any) -> About:
    """Return the description of a model output for labels of several parts, such as tokens."""
    return About(
        label=parts,
        prediction="right",
        columns=f"label: how many {parts} count; prediction: how many of them the model gets right",
        counts_parts=True,
        weight_is_probability=True,
        has_loss_noise=True,
        **fields,
    )


# Causal, masked and sequence-to-sequence models share this description, because f is the same
# function of the tokens' log-odds.
_TOKENS = _of_parts(
    "tokens",
    name="the joint log-odds of the tokens that count",
    unit=_LOG_ODDS,
    meaning="the more probable the model finds this text, or this answer to its prompt",
    place="language_modelling.LANGUAGE_MODELLING",
)
TABLE: dict[str, About] = {
    "image_classification": _LABEL,
    "text_classification": _LABEL,
    "language_modelling": _TOKENS,
    "masked_language_modelling": replace(
        _TOKENS, place="language_modelling.MASKED_LANGUAGE_MODELLING"
    ),
    "sequence_to_sequence": replace(_TOKENS, place="language_modelling.SEQUENCE_TO_SEQUENCE"),
    "token_log_odds": replace(
        _TOKENS,
        name="the sum of the log-odds of the tokens that count",
        place="language_modelling.TOKEN_LOG_ODDS",
    ),
    "multi_label": _of_parts(
        "labels",
        name="the joint log-odds of the labels that count",
        unit=_LOG_ODDS,
        meaning="the more certain the model is of all of the sample's labels",
        place="supervised.MULTI_LABEL",
    ),
    "regression": About(
        name="the prediction",
        unit="the unit of the label",
        meaning="the larger the number that the model predicts",
        raises="the prediction",
        better="closer",
        place="supervised.REGRESSION",
        weight_is_probability=False,
        weighs_by_curvature=True,
        has_loss_noise=True,
    ),
    "segmentation": _of_parts(
        "pixels",
        name="the mean log-odds of the pixels' labels",
        unit=f"{_LOG_ODDS}, of one pixel",
        meaning="the more certain the model is of the pixels' labels",
        place="supervised.SEGMENTATION",
    ),
    "clip": About(
        name="the log-odds of the pair among others, summed over both directions",
        unit="the sum of two log-odds, log(p / (1 - p)): of the text among texts, given the image, "
        "and of the image among images, given the text; 0 is a coin toss",
        meaning="the better the image and the text fit each other, compared with other pairs",
        label="",
        prediction="told apart",
        columns="label: always 1; prediction: 1 if the pair is likelier than all others together, "
        "among texts and among images, else 0",
        place="clip.contrast",
        weight_is_probability=True,
        needs_pairs=True,
    ),
    "loss": About(
        name="minus the loss",
        unit="the unit of the loss",
        meaning="the smaller the loss",
        label="",
        prediction="",
        columns="label: always 1; prediction: f, because a loss has no prediction",
        place="supervised.LOSS",
        weight_is_probability=False,
    ),
}


def output_name(model_output: str | Mapping[str, Any]) -> str:
    """Return the name of a config's model output, or ``file.py:function`` for a user's function."""
    return model_output if isinstance(model_output, str) else model_output["function"]


def function_location(name: str) -> tuple[str, str] | None:
    """Return the file and the function of a user-defined model output, or None for a named one."""
    file, _, function = name.rpartition(":")
    return (file, function) if name not in TABLE and file else None


def about_output(model_output: str | Mapping[str, Any]) -> About:
    """Return the description of a config's model output, which may be user-defined."""
    name = output_name(model_output)
    if name in TABLE:
        return TABLE[name]
    texts = {} if isinstance(model_output, str) else dict(model_output)
    label, prediction = (texts.get(key, "") for key in ("label", "prediction"))
    return About(
        name=texts.get("name", f"the number that {name} returns"),
        unit=texts.get("unit", "not stated"),
        meaning=texts.get("meaning", f"the larger {texts.get('name', 'that number')}"),
        label=label,
        prediction=prediction,
        columns=f"label: {label or 'the label, or the mean of its numbers'}; prediction: "
        f"{prediction or 'the prediction that the model output defines, or else f'}",
        raises="" if texts.get("larger_is_better") else "f",
        better="larger" if texts.get("larger_is_better") else "",
        place="",
        weight_is_probability=False,
    )
