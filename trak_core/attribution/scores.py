"""The class ``Scores``, which shows scores as tables, and as HTML in notebooks."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from trak_core.artifacts import SCORES, open_artifact
from trak_core.attribution.combine_checkpoints import (
    KeptScores,
    add_improving_signs,
    fast_rows,
    influence_table,
    sample_table,
)
from trak_core.attribution.fitted_checkpoint import MemoryPart, score_rows
from trak_core.attribution.score_formulas import unit_of
from trak_core.config.memory_needs import average_need
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import about_output
from trak_core.settings import ScoresSpec
from trak_core.study.dataset_split import Split

# For each of 5 targets, a notebook shows 3 training samples with scores of each sign.
_SHOWN, _EACH = 5, 3
# A function (is_target, sample_id) that returns the HTML of a target or a training sample.
ShowSample = Callable[[bool, Any], str]


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of all training samples for some targets, the result of ``Attributor.score``.

    A positive score means that the training sample raised the target's model output.

    Attributes:
        targets: A table of the targets, indexed by id, with columns ``label``, ``prediction``,
            ``output`` and ``output_sd`` (mean and standard deviation over checkpoints), and columns
            that a run's study adds.
        train: A table of the training samples with the same columns and ``loss_weight``. It also
            has the columns ``help`` and ``harm`` if it is known which sign of a score improves a
            target.
        unit: A text that states the unit of scores.
    """

    targets: pd.DataFrame
    train: pd.DataFrame
    unit: str
    influences: pd.DataFrame
    n_kept: int
    read_matrix: Callable[[], np.ndarray] | None
    show: ShowSample | None = None
    # The targets' samples and the setup of the attributor that computed the scores. None if the
    # scores were read from a file or unpickled.
    samples: Split | None = None
    setup: object = None
    # The words for a sample's label and prediction in notebooks.
    words: tuple[str, str] = ("label", "predicted")

    @classmethod
    def of_parts(
        cls,
        parts: Sequence[MemoryPart],
        spec: ScoresSpec,
        *,
        keep: str,
        top: int,
        memory_mb: int,
        **more: Any,
    ) -> Self:
        """Return the scores from the ``parts`` of all checkpoints, averaged over checkpoints.

        ``keep`` and ``top`` are arguments of
        ``Attributor.score``. ``more`` sets other attributes of the result.
        """
        n, m = (len(parts[0].vector(f"{side}_ids")) for side in ("train", "target"))
        need = average_need(
            n_train=n, n_targets=m, n_checkpoints=len(parts), top=top, solved_dim=None
        )
        block = min(need.rows(memory_mb), fast_rows(m))
        ends = [parts[spec.checkpoints.index(checkpoint)] for checkpoint in spec.ends]
        targets, train = (sample_table(ends, side, block) for side in ("target", "train"))
        about = about_output(spec.features.model_output)
        add_improving_signs(targets, about)
        read = score_rows(parts, [part.rows for part in parts], spec)
        matrix = np.empty((n, m), np.float32) if keep == "full" else None

        def blocks() -> Iterable[tuple[int, np.ndarray]]:
            for start in range(0, n, block):
                part = read(start, min(start + block, n)).astype(np.float32)
                if matrix is not None:
                    matrix[start : start + len(part)] = part
                yield start, part

        labels = targets["label"] if about.labels_are_classes else None
        kept = KeptScores.of(blocks(), targets.get("improves"), labels, top)
        train |= kept.by_sample
        return cls(
            pd.DataFrame(targets).set_index("id"),
            pd.DataFrame(train).set_index("id"),
            unit_of(spec),
            pd.DataFrame(influence_table(kept, train, targets)),
            top,
            None if matrix is None else partial(np.asarray, matrix),
            words=(about.label, about.prediction),
            **more,
        )

    @classmethod
    def of_file(cls, path: Path, texts: Mapping[str, pd.DataFrame]) -> Self:
        """Return the scores in a run's file. The matrix is read only when it is needed.

        ``texts`` contains tables, indexed by id, whose columns are added to ``targets`` and
        ``train``.
        """
        with open_artifact(path, SCORES) as file:
            targets, train = (
                file.table(key).set_index("id").join(texts.get(key, pd.DataFrame()))
                for key in ("targets", "train")
            )
            top = file.table("top_influences")
            reads = partial(_read_scores, path) if file.has("scores") else None
            unit, about = str(file.attribute("unit")), about_output(file.spec["model_output"])
        words = about.label, about.prediction
        return cls(targets, train, unit, top, max(top["rank"].tolist()), reads, words=words)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that pickle stores, without the samples."""
        return {**vars(self), "show": None, "samples": None, "setup": None}

    @property
    def matrix(self) -> np.ndarray:
        """All scores, shape (n_train, n_targets), float32. Needs ``keep="full"``."""
        if self.read_matrix is None:
            raise InputError(
                "The matrix of scores exists only with `keep: full`. Found `keep: top_k`, which "
                f"kept {self.n_kept} scores of each sign for each target. Use top(k) and bottom(k) "
                f"with k up to {self.n_kept}, or compute the scores with `keep: full`.",
                code="artifacts.no_matrix",
            )
        return self.read_matrix()

    @property
    def frame(self) -> pd.DataFrame:
        """All scores, float32, with a row for each training sample and a column for each target."""
        return pd.DataFrame(self.matrix, self.train.index, self.targets.index)

    def top(self, k: int = 10) -> pd.DataFrame:
        """Return the ``k`` training samples that raised each target's model output most.

        Columns are ``target``, ``rank`` (from 1), ``train`` and ``score``. Scores of 0 are omitted.
        """
        return self._strongest(k, 1)

    def bottom(self, k: int = 10) -> pd.DataFrame:
        """Return the ``k`` training samples that lowered each target's model output most."""
        return self._strongest(k, -1)

    def _strongest(self, k: int, sign: int) -> pd.DataFrame:
        influences = self.influences
        if self.n_kept < min(k, len(self.train)):
            signed = sign * self.matrix
            order = np.argsort(-signed, axis=0, kind="stable")[:k].T
            scores = np.take_along_axis(signed.T, order, axis=1)
            target, rank = np.nonzero(scores > 0)
            return pd.DataFrame({
                "target": self.targets.index[target],
                "rank": rank + 1,
                "train": self.train.index[order[target, rank]],
                "score": sign * scores[target, rank],
            })
        own = influences.loc[(influences["sign"] == sign) & (influences["rank"] <= k), :]
        names = {"target_id": "target", "train_id": "train"}
        own = own.rename(columns=names)[["target", "rank", "train", "score"]]
        return own.reset_index(drop=True)

    def of_train(self, train_id: Any) -> pd.DataFrame:
        """Return a training sample's scores, largest first, with columns ``target`` and ``score``.

        With ``keep="top_k"``, targets are omitted if they have no kept score for this sample.
        """
        if train_id not in self.train.index:
            raise InputError(
                f"`train_id` must be the id of a training sample, such as {self.train.index[0]!r}. "
                f"Found {train_id!r}.",
                code="artifacts.no_sample",
            )
        if self.read_matrix is None:
            both = pd.concat([self.top(self.n_kept), self.bottom(self.n_kept)])
            table = both.loc[both["train"] == train_id, ["target", "score"]]
        else:
            row = self.matrix[self.train.index.get_loc(train_id)]
            table = pd.DataFrame({"target": self.targets.index, "score": row})
        return table.sort_values("score", ascending=False, kind="stable").reset_index(drop=True)

    def __repr__(self) -> str:
        """Return a string with the size of the matrix and the largest scores."""
        n, m = len(self.train), len(self.targets)
        return f"Scores of {n} training samples for {m} targets; unit: {self.unit}\n{self.top(3)}"

    def _repr_html_(self) -> str:
        """Return HTML for Jupyter: the first targets and the strongest training samples of each."""
        n, m = len(self.train), len(self.targets)
        style = ' style="text-align: left; vertical-align: top"'
        rows = [f"<th{style}>Target<th{style}>Pushed up by<th{style}>Pushed down by"]
        tables = [
            t.join(self.train["label"], on="train") for t in (self.top(_EACH), self.bottom(_EACH))
        ]
        known = self.targets.iloc[:_SHOWN].reset_index()
        for target in known[["id", "label", "prediction"]].itertuples(index=False):
            cells = [self._shown(True, *target)]
            for table in tables:
                own = table.loc[table["target"] == target[0], ["train", "label", "score"]]
                shown = [
                    self._shown(False, i, label, score=f"{score:+.3g}")
                    for i, label, score in own.itertuples(index=False)
                ]
                cells.append("".join(shown))
            rows.append("".join(f"<td{style}>{cell}" for cell in cells))
        some = f" {_SHOWN} of {m} targets are shown; all are in top(), bottom() and frame."
        return (
            f"<p>Scores of {n} training samples for {m} targets.{some if m > _SHOWN else ''} "
            f"Unit: {self.unit}</p>"
            f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
        )

    def _shown(self, is_target: bool, sample_id: Any, *values: Any, score: str = "") -> str:
        """Return HTML for a sample, its id, and ``values`` (its label and its prediction)."""
        texts = [f"{value:.3g}" if isinstance(value, float) else value for value in values]
        about = [f"{word} {text}" for word, text in zip(self.words, texts, strict=False) if word]
        about += [score] * bool(score)
        table = self.targets if is_target else self.train
        sample = ""
        if self.show is not None:
            sample = f"{self.show(is_target, sample_id)}<br>"
        elif "described_text" in table:  # A scores file stores the texts, not the samples.
            text = table["described_text"].get(sample_id)
            sample = f"{html.escape(text)}<br>" if isinstance(text, str) else ""
        caption = f"<b>{html.escape(str(sample_id))}</b> {html.escape(', '.join(about))}"
        return f'<div style="display: inline-block; margin: 0 8px 8px 0">{sample}{caption}</div>'


def _read_scores(path: Path) -> np.ndarray:
    with open_artifact(path, SCORES) as file:
        return file.matrix("scores")[:]
