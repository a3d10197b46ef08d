"""Make a sample of a question, and hold its answer: the strongest training samples, with texts."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pandas as pd

from trak_core.errors import InputError, listed
from trak_core.model_outputs.about_outputs import about_output
from trak_core.report.read_results import named
from trak_core.report.template_filters import of_target
from trak_core.study.dataset_split import label_of, with_label
from trak_core.study.study import Study


@dataclass(frozen=True, slots=True)
class Asked:
    """A sample to be explained, its id, and the fields of the line that it was made of.

    ``own_label`` is the class that it has, by its name or number, if it is explained as of another.
    """

    id: int | str
    sample: Any
    fields: Mapping[str, Any] = field(default_factory=dict)
    own_label: str | int | None = None


def as_of_class(asked: Asked, label: str, study: Study, model_output: str) -> Asked:
    """Return a sample with another label: one of the study's names of classes, or a number.

    Its answer says what spoke for that class, such as a wrong prediction.
    """
    if not about_output(model_output).labels_are_classes:
        raise InputError(
            "Another label must be a class. Found a model output whose labels are none, "
            f"{model_output}. Ask without.",
            code="queries.label",
        )
    names = study.class_names()
    if label not in names and (names or not label.isdecimal()):
        raise InputError(
            f"A label must be {'one of ' + listed(names) if names else 'the number of a class'}. "
            f"Found {label}.",
            code="queries.label",
        )
    number = names.index(label) if names else int(label)
    own_label = named(names, int(label_of(asked.sample)))
    return replace(asked, sample=with_label(asked.sample, number), own_label=own_label)


@dataclass(frozen=True, slots=True)
class Answer:
    """Which training samples pushed a sample's model output up, and which down.

    Attributes:
        asked: The sample.
        target: Its ``id``, ``label``, ``prediction``, ``output`` (the model output, mean over the
            ends of runs) and ``output_sd``, as the table ``targets`` of a scores file has them.
        text: The study's words for it, or what is printed of it.
        scores: A score for each training sample, by id, float32.
        influences: The strongest of either sign, as the table ``top_influences`` of a scores file.
        train: What is known of these training samples, by id, and ``described_text``.
        model_output: What the config says of the model output f.
        class_names: What the study calls the classes, by number; empty if it doesn't.
        tokens: Scores of ``top`` cut by tokens, if that was asked for: ``train_id``, ``side``
            (``train`` or ``target``, whose tokens these are), ``token`` (from 0; -1 for what is no
            token's), ``text`` and ``score``. Those of a side and a training sample add up to its
            score, to within the rounding of features (int8: up to 1 % of the largest score).
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
        """The strongest by score, the most helpful first: ``train_id``, ``score``, ``train``."""
        both = self.influences.sort_values("score", ascending=False, kind="stable")
        both = both[["train_id", "score"]].reset_index(drop=True)
        return both.join(self.train, on="train_id")

    def tokens_of(self, train_id: int | str | None = None) -> pd.DataFrame:
        """Return ``text`` and ``score`` of a training sample's tokens; else of the asked sample's.

        The latter are sums over the training samples in ``top``. No rows if none are known.
        """
        if self.tokens is None:
            return pd.DataFrame({"text": [], "score": []})
        tokens = self.tokens.loc[self.tokens["token"] >= 0, :]
        if train_id is not None:
            is_own = (tokens["side"] == "train") & (tokens["train_id"] == train_id)
            return tokens.loc[is_own, ["text", "score"]].reset_index(drop=True)
        own = tokens.loc[tokens["side"] == "target", :]
        return own.groupby("token").agg({"text": "first", "score": "sum"}).reset_index(drop=True)

    def side(self, sign: int) -> pd.DataFrame:
        """Return rows of ``top`` that pushed up (1) or down (-1), the strongest first.

        It has the columns that tell a reader what a training sample is.
        """
        label = about_output(self.model_output).label
        top = self.top.assign(label=[self.named(number) for number in self.top["label"].tolist()])
        left_out = ["prediction", "output", "output_sd", *([] if label else ["label"])]
        known = top.loc[top["score"] * sign > 0, :].drop(columns=left_out)
        if label not in known:  # else a column of the study's own
            known = known.rename(columns={"label": label})
        return known if sign > 0 else known.iloc[::-1]

    def said(self) -> str:
        """Return what the models make of the sample, in words: the output, then its prediction."""
        about = about_output(self.model_output)
        sd = f" ± {self.target['output_sd']:.2g}" if self.target["output_sd"] > 0 else ""
        if self.target["prediction"] == self.target["output"]:  # of regression
            about = replace(about, prediction="")
        said = {key: self.named(self.target[key]) for key in ("label", "prediction")}
        words = of_target(SimpleNamespace(**said), about)
        if self.asked.own_label is not None:
            words += f"; its own label {self.asked.own_label}"
        return f"{about.name}: {self.target['output']:.4g}{sd}{words and '; ' + words}"

    def named(self, number: Any) -> Any:
        """Return the name of a class, where labels and predictions are numbers of such."""
        is_class = about_output(self.model_output).labels_are_classes
        return named(self.class_names, number) if is_class else number

    def __repr__(self) -> str:
        """Return the sample and its strongest training samples."""
        return f"{self.text}\n{self.said()}\n{self.top}"

    def _repr_html_(self) -> str:
        """Return the sample and two tables, for Jupyter."""
        parts = [f"<p>{html.escape(self.text)}</p><p>{html.escape(self.said())}</p>"]
        with pd.option_context("display.max_colwidth", None):
            for sign, words in ((1, "Pushed it up"), (-1, "Pushed it down")):
                parts += [f"<p><b>{words}</b></p>", self.side(sign).to_html(index=False)]
        return "".join(parts)
