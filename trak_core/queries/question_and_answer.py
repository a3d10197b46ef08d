"""Define a sample to explain, and the answer, which contains its strongest training samples."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pandas as pd

from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import about_output
from trak_core.report.template_filters import of_target
from trak_core.study.dataset_split import label_of, with_label
from trak_core.study.sample_columns import named
from trak_core.study.show_samples import table_as_html
from trak_core.study.study import Study


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample to explain, with its id.

    ``fields`` contains the fields of the line from which the study encoded the sample. If the label
    was replaced by another class, ``own_label`` is the name or number of the original class.
    """

    id: int | str
    sample: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    own_label: str | int | None = None


def as_of_class(asked: Asked, label: str, study: Study, model_output: str) -> Asked:
    """Return a sample whose label is replaced by another class, given by name or number.

    Its scores explain the model output for that class, which can be a wrong prediction.
    """
    if not about_output(model_output).labels_are_classes:
        raise InputError(
            "A label can be replaced only if labels are classes. Found the model output "
            f"{model_output}, whose labels are not classes. Ask without another label.",
            code="queries.label",
        )
    names = study.class_names()
    if label not in names and (names or not label.isdecimal()):
        choices = f"one of {listed(names)}" if names else "the number of a class"
        raise InputError(f"A label must be {choices}. Found {label}.", code="queries.label")
    number = names.index(label) if names else int(label)
    own_label = named(names, int(label_of(asked.sample)))
    return replace(asked, sample=with_label(asked.sample, number), own_label=own_label)


@dataclass(frozen=True, slots=True)
class Answer:
    """The training samples that pushed a sample's model output up and down most.

    Attributes:
        asked: The sample that was asked about.
        target: The ``id``, ``label`` and ``prediction`` of the sample, the mean ``output`` of the
            model over the last checkpoints of the runs, and its standard deviation ``output_sd``.
        text: The study's description of the sample.
        scores: The score of each training sample, in float32, with the training ids as index.
        influences: The strongest positive and negative scores, with the columns of the table
            ``top_influences`` in a scores file.
        train: A table of the training samples in ``influences``, by id, with their columns and
            their ``described_text``.
        model_output: The model output that was explained, as in the config.
        class_names: The names of the classes, in order. Empty if the study does not name classes.
        tokens: None, or a table that splits the scores in ``influences`` by token, in the form that
            ``Attributor.tokens`` returns, with the ``text`` of each token. The scores of a training
            sample's tokens add up to the score of the pair, and so do those of the target's tokens,
            except for rounding errors of features (with int8, 1 % of the largest score).
    """

    asked: Asked
    target: Mapping[str, Any]
    text: str
    scores: pd.Series
    influences: pd.DataFrame
    train: pd.DataFrame
    model_output: str | Mapping[str, str]
    class_names: Sequence[str] = ()
    tokens: pd.DataFrame | None = None

    @property
    def top(self) -> pd.DataFrame:
        """A table of the strongest training samples, from the largest score to the smallest."""
        both = self.influences.sort_values("score", ascending=False, kind="stable")
        both = both[["train_id", "score"]].reset_index(drop=True)
        return both.join(self.train, on="train_id")

    def tokens_of(self, train_id: int | str | None = None) -> pd.DataFrame:
        """Return a table with the ``text`` and ``score`` of each token of a training sample.

        If ``train_id`` is None, the table contains the tokens of the asked sample, with the sums of
        their scores over the training samples in ``top``. The table is empty if the answer has no
        scores by token.
        """
        if self.tokens is None:
            return pd.DataFrame({"text": [], "score": []})
        tokens = self.tokens.loc[self.tokens["token"] >= 0, :]
        if train_id is not None:
            is_asked = (tokens["side"] == "train") & (tokens["train_id"] == train_id)
            return tokens.loc[is_asked, ["text", "score"]].reset_index(drop=True)
        target = tokens.loc[tokens["side"] == "target", :]
        return target.groupby("token").agg({"text": "first", "score": "sum"}).reset_index(drop=True)

    def side(self, sign: int) -> pd.DataFrame:
        """Return the rows of ``top`` with positive scores (``sign`` is 1) or negative ones (-1).

        The strongest scores come first. Columns with model outputs and predictions are left out.
        """
        label = about_output(self.model_output).label
        top = self.top.assign(label=[self.named(number) for number in self.top["label"].tolist()])
        left_out = ["prediction", "output", "output_sd", *([] if label else ["label"])]
        rows = top.loc[top["score"] * sign > 0, :].drop(columns=left_out)
        if label not in rows:  # Otherwise the study has a column with this name.
            rows = rows.rename(columns={"label": label})
        return rows if sign > 0 else rows.iloc[::-1]

    def said(self) -> str:
        """Return a text with the sample's model output, label and prediction."""
        about = about_output(self.model_output)
        sd = f" ± {self.target['output_sd']:.2g}" if self.target["output_sd"] > 0 else ""
        if self.target["prediction"] == self.target["output"]:  # This is a regression.
            about = replace(about, prediction="")
        names = {key: self.named(self.target[key]) for key in ("label", "prediction")}
        text = of_target(SimpleNamespace(**names), about)
        if self.asked.own_label is not None:
            text += f"; its own label {self.asked.own_label}"
        return f"{about.name}: {self.target['output']:.4g}{sd}{text and '; ' + text}"

    def named(self, number: Any) -> Any:
        """Return the name of the class ``number``, or ``number`` itself if it is not a class."""
        is_class = about_output(self.model_output).labels_are_classes
        return named(self.class_names, number) if is_class else number

    def __repr__(self) -> str:
        """Return the sample and its strongest training samples as text."""
        return f"{self.text}\n{self.said()}\n{self.top}"

    def _repr_html_(self) -> str:
        """Return the sample and its strongest training samples as HTML, for Jupyter."""
        parts = [f"<p>{html.escape(self.text)}</p><p>{html.escape(self.said())}</p>"]
        with pd.option_context("display.max_colwidth", None):
            for sign, words in ((1, "Pushed it up"), (-1, "Pushed it down")):
                parts += [f"<p><b>{words}</b></p>", table_as_html(self.side(sign))]
        return "".join(parts)
