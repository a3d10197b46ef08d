"""What a model output is, for who has never seen one."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Output:
    """A model output in plain words.

    Attributes:
        name: With an article.
        unit: Of its numbers.
        meaning: What a larger one says, after "the larger f, ".
    """

    name: str
    unit: str
    meaning: str


_LOG_ODDS = (
    "log-odds, log(p / (1 - p)): 0 is a coin toss, +3 means p = 95 %, \N{MINUS SIGN}3 means 5 %"
)
OUTPUTS = {
    "image_classification": Output(
        "the log-odds of the label", _LOG_ODDS, "the surer the model is of the sample's own label"
    ),
    "text_classification": Output(
        "the log-odds of the label", _LOG_ODDS, "the surer the model is of the sample's own label"
    ),
    "language_modelling": Output(
        "the log-odds of the whole text", _LOG_ODDS, "the likelier the model finds the text"
    ),
    "regression": Output(
        "the prediction", "the label's own unit", "the larger the number that the model predicts"
    ),
    "segmentation": Output(
        "the mean log-odds of the pixels' labels",
        f"{_LOG_ODDS}, of one pixel",
        "the surer the model is of the pixels' own labels",
    ),
    "clip": Output(
        "the log-odds of the pair among others, both ways added up",
        "two log-odds, log(p / (1 - p)), added up: of the text among texts for this image, and of "
        "the image among images for this text; 0 is a coin toss",
        "the better image and text fit each other, beside others",
    ),
}
