"""The table of model outputs that a config may name: what each needs, and its words for readers.

A config may also bring one of its own, a function in a Python file; ``about_output`` has words for
either. A new row needs its name in the config's schema and its line in ``config/README.md``;
``tests/library/test_registries.py`` says what is missing. Every start of Snakemake reads this, so
that torch is imported by ``load`` alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trak_core.model_outputs.model_output import ModelOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A model output in plain words, and what it needs from a study.

    Attributes:
        name: In plain words, with an article.
        meaning: What a larger one says, after "the larger f, ".
        label: A word for a table's column ``label``; empty where the column says nothing.
        prediction: A word for its column ``prediction``.
        columns: One line on both columns, for readers of the tables.
        raises: What a positive score raises, where a larger f is no better than a smaller one.
        better: Which f has the smaller loss: the ``larger`` one; the ``closer`` one to the label;
            or, where it is empty, nobody knows, so that no score helps or harms.
        place: Where the model output is: a module of this package, and a name in it. Empty for a
            function of the user's own, which is loaded with the study.
        labels_are_classes: Whether a sample has one label out of a few.
        counts_parts: Whether a table's column ``label`` says how many parts of a label count, and
            ``prediction`` how many of them the model gets right.
        weight_is_probability: Whether the loss weight Q is a probability, or a mean of some: within
            0 and 1, and nearly 0 for samples that a model is sure of. Else its unit has no bound.
        weighs_by_curvature: Whether training samples weigh by the curvature of their loss, unless
            the config says otherwise, where checkpoints come from along runs. Not where the loss is
            no function of f, nor for whole texts: with probabilities of e^-100 the shortest text
            would count alone.
        has_loss_hessian: Whether the Hessian of the training loss in the model's logits is known,
            of which `projection: gauss_newton` makes its matrix.
        needs_pairs: Whether a sample is told apart from others, drawn out of the training data.
    """

    name: str
    unit: str
    meaning: str
    label: str = "label"
    prediction: str = "predicted"
    columns: str = "label: the sample's own; prediction: what the model says in its place"
    raises: str = ""
    better: Literal["larger", "closer", ""] = "larger"
    place: str
    labels_are_classes: bool = False
    counts_parts: bool = False
    weight_is_probability: bool
    weighs_by_curvature: bool = False
    has_loss_hessian: bool = False
    needs_pairs: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is a function of the user's own."""
        return not self.place

    @property
    def sides(self) -> tuple[str, str]:
        """Say what training samples with positive scores do, and those with negative ones."""
        if self.raises:
            return f"Raise {self.raises} most", f"Lower {self.raises} most"
        return "Most helpful: push f up", "Most harmful: push f down"

    @property
    def verdicts(self) -> tuple[str, str]:
        """Say whether a positive score is good, and whether a negative one is, after what it is."""
        if self.better == "closer":
            return " (good where f is below the label)", " (good where f is above the label)"
        neither = "", ". Neither is good or bad by itself"
        return neither if self.raises else (" (helpful)", " (harmful)")

    @property
    def effects(self) -> tuple[str, str]:
        """Say what training samples do that help a target, and what those that harm it."""
        if self.better == "closer":
            return "bring f closer to the label", "take f away from the label"
        return f"push {self.raises or 'f'} up", f"push {self.raises or 'f'} down"

    @property
    def worst_fitted(self) -> str:
        """Say by which column of a list the samples that the models fit worst come first."""
        is_distance = self.better == "closer"
        return "size of loss_weight, largest first" if is_distance else "output, lowest first"

    def load(self, *others: Any) -> "ModelOutput":
        """Return the model output; ``contrast`` gets the arguments, where it ``needs_pairs``."""
        from trak_core.model_outputs import clip, language_modelling, supervised

        modules = {"clip": clip, "language_modelling": language_modelling, "supervised": supervised}
        module, name = self.place.split(".")
        output = getattr(modules[module], name)
        return output(*others) if self.needs_pairs else output


_LOG_ODDS = (
    "log-odds, log(p / (1 - p)): 0 is a coin toss, +3 means p = 95 %, \N{MINUS SIGN}3 means 5 %"
)
# Texts are classified as images are: their samples differ, f does not.
_LABEL = About(
    name="the log-odds of the label",
    unit=_LOG_ODDS,
    meaning="the surer the model is of the sample's own label",
    place="supervised.CLASSIFICATION",
    labels_are_classes=True,
    weight_is_probability=True,
    weighs_by_curvature=True,
    has_loss_hessian=True,
)
# Causal, masked, or from a source: what the tokens are predicted from differs, f does not.
_TOKENS = About(
    name="the joint log-odds of the tokens that count",
    unit=_LOG_ODDS,
    meaning="the likelier the model finds them",
    label="tokens",
    prediction="right",
    columns="label: how many tokens count; prediction: how many of them the model gets right",
    place="language_modelling.LANGUAGE_MODELLING",
    counts_parts=True,
    weight_is_probability=True,
    has_loss_hessian=True,
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
        name="the log-odds of the tokens that count, added up",
        place="language_modelling.TOKEN_LOG_ODDS",
    ),
    "multi_label": About(
        name="the joint log-odds of the labels that count",
        unit=_LOG_ODDS,
        meaning="the surer the model is of all the sample's own labels",
        label="labels",
        prediction="right",
        columns="label: how many labels count; prediction: how many of them the model gets right",
        place="supervised.MULTI_LABEL",
        counts_parts=True,
        weight_is_probability=True,
        has_loss_hessian=True,
    ),
    "regression": About(
        name="the prediction",
        unit="the label's own unit",
        meaning="the larger the number that the model predicts",
        raises="the prediction",
        better="closer",
        place="supervised.REGRESSION",
        weight_is_probability=False,
        weighs_by_curvature=True,
        has_loss_hessian=True,
    ),
    "segmentation": About(
        name="the mean log-odds of the pixels' labels",
        unit=f"{_LOG_ODDS}, of one pixel",
        meaning="the surer the model is of the pixels' own labels",
        label="pixels",
        prediction="right",
        columns="label: how many pixels count; prediction: how many of them the model gets right",
        place="supervised.SEGMENTATION",
        counts_parts=True,
        weight_is_probability=True,
        has_loss_hessian=True,
    ),
    "clip": About(
        name="the log-odds of the pair among others, both ways added up",
        unit="two log-odds, log(p / (1 - p)), added up: of the text among texts for this image, "
        "and of the image among images for this text; 0 is a coin toss",
        meaning="the better image and text fit each other, beside others",
        label="",
        prediction="told apart",
        columns="label: 1; prediction: 1 where the pair is likelier than all others together, both "
        "ways, else 0",
        place="clip.contrast",
        weight_is_probability=True,
        needs_pairs=True,
    ),
    "loss": About(
        name="minus the loss",
        unit="the loss's own unit",
        meaning="the smaller the loss",
        label="",
        prediction="",
        columns="label: 1; prediction: f, because a loss says neither",
        place="supervised.LOSS",
        weight_is_probability=False,
    ),
}


def output_name(model_output: str | Mapping[str, Any]) -> str:
    """Return the name of a config's model output; one of its own has ``file.py:function``."""
    return model_output if isinstance(model_output, str) else model_output["function"]


def place_of(name: str) -> tuple[str, str] | None:
    """Return the file and the function that a model output's name says; None for a row's name."""
    file, _, function = name.rpartition(":")
    return (file, function) if name not in TABLE and file else None


def about_output(model_output: str | Mapping[str, Any]) -> About:
    """Return what is known of a config's model output, by its name, or with words for its own."""
    name = output_name(model_output)
    if name in TABLE:
        return TABLE[name]
    words = {} if isinstance(model_output, str) else dict(model_output)
    label, prediction = (words.get(key, "") for key in ("label", "prediction"))
    return About(
        name=words.get("name", f"the number that {name} returns"),
        unit=words.get("unit", "its own"),
        meaning=words.get("meaning", f"the larger {words.get('name', 'that number')}"),
        label=label,
        prediction=prediction,
        columns=f"label: {label or 'its number, the mean of several'}; prediction: "
        f"{prediction or 'what the model output says it is, else f'}",
        raises="" if words.get("larger_is_better") else "f",
        better="larger" if words.get("larger_is_better") else "",
        place="",
        weight_is_probability=False,
    )
