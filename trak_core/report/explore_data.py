"""The page to explore an experiment: all its targets and their training samples, as data.

A template shows the first targets; the page's script shows all, from the same data. What doesn't
fit into a page of a size that opens at once is left out, and said to be.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from trak_core.model_outputs.about_outputs import About
from trak_core.report.read_results import File, output_of, rows_with
from trak_core.report.template_filters import anchor, is_right, label, number, of_target, signed
from trak_core.spec import MEAN_OF
from trak_core.study.sample_columns import RESERVED
from trak_core.study.show_samples import BEGINNING, Picture, readable

# Training samples of either sign beside a target; targets that show without the script.
EACH_ON_PAGE, AT_ONCE = 10, 20
# Bytes of a page; those of them that ids, scores and columns may take; and what prose, style and
# script take, with the targets that show without the script.
_PAGE, _ROWS, _MARKUP = 5_000_000, 2_500_000, 600_000
# Characters of a text, where all fit; else BEGINNING.
_CHARACTERS = 1000

# Shows a target (or, if not, a training sample) by its id, with so many characters of text; and
# gives a digest that samples of equal contents share.
Show = Callable[[bool, Any, int], tuple[Picture | str, bytes]]
_EQUAL_HARMS = (
    "A training sample equal to this target is among its most harmful: compare their labels, or "
    "which of their tokens count."
)
# The strongest colour of a token.
LEVELS = 9


@dataclass(frozen=True, slots=True)
class Tokens:
    """Scores of tokens, to be shown as colours: by target and training sample, and by target.

    ``texts`` gives what stands for the tokens of a target (or, if not, a training sample), from its
    id and their number. Those of a target's own tokens are sums over its training samples.
    """

    texts: Callable[[bool, Any, int], Sequence[str]]
    train: Mapping[tuple[Any, Any], np.ndarray]
    targets: Mapping[Any, np.ndarray]

    @classmethod
    def of(cls, table: pd.DataFrame, texts: Callable[[bool, Any, int], Sequence[str]]) -> "Tokens":
        """Return those in a table ``tokens`` of token scores."""
        of_tokens = table.loc[table["token"] >= 0, :]
        train: dict[tuple[Any, Any], np.ndarray] = {}
        targets: dict[Any, np.ndarray] = {}
        columns = (of_tokens[name].tolist() for name in ("side", "target_id", "train_id"))
        keys = list(zip(*columns, strict=True))
        scores = np.asarray(of_tokens["score"])
        starts = [i for i, key in enumerate(keys) if i == 0 or key != keys[i - 1]]
        for start, stop in itertools.pairwise([*starts, len(keys)]):
            side, target, sample = keys[start]
            own = scores[start:stop]
            if side == "train":
                train[target, sample] = own
            else:
                targets[target] = targets.get(target, 0) + own
        return cls(texts, train, targets)


def token_levels(scores: np.ndarray) -> list[int]:
    """Return whole numbers in proportion to scores, the largest of which has ``LEVELS``."""
    largest = np.abs(scores).max(initial=0)
    if not largest > 0:
        return [0] * len(scores)
    return np.rint(LEVELS * scores / largest).astype(int).tolist()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the page shows of an experiment.

    Attributes:
        experiment: Its scores, see ``read_experiment``.
        targets: For each target its id, words, columns, ``influences`` (the place in ``train``,
            the score, and the levels of its tokens where they are known) and ``sample``; where
            tokens have scores, their texts and levels too. ``equal`` says by places which of these
            samples have the same contents as others or as the target, and ``equal_harms`` that one
            that has the target's is among the most harmful, if it is.
        train: Likewise for each training sample beside a target, and those that harm most.
        columns: Names of the columns of ``targets`` and ``train``, as their ``values`` are ordered.
        pictures: Addresses of the pictures that show without the script, by their place.
    """

    experiment: File
    targets: Sequence[Mapping[str, Any]]
    train: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Sequence[str]]
    pictures: Mapping[str, str]
    drawn: bool
    described: bool

    @property
    def is_mean(self) -> bool:
        """Whether the one target is a mean of others, or a difference of two means: no sample."""
        return MEAN_OF in self.experiment.tables["targets"]

    @property
    def n_left_out(self) -> tuple[int, int]:
        """Targets that are not on the page, and samples on it that don't show."""
        samples = [*self.train] if self.is_mean else [*self.targets, *self.train]
        without = sum(sample["sample"] is None for sample in samples)
        return len(self.experiment.tables["targets"]) - len(self.targets), without

    @property
    def says(self) -> str:
        """What the words beside samples mean: label, prediction, and the study's own columns."""
        about = output_of(self.experiment)
        sentences = []
        if about.label != "label" and not (about.is_own or self.is_mean):
            meanings = about.columns.removeprefix("label: ").split("; prediction: ")
            pairs = zip((about.label, about.prediction), meanings, strict=True)
            sentences += [f"{word} says {meaning}" for word, meaning in pairs if word]
        names = dict.fromkeys(name for names in self.columns.values() for name in names)
        own = [name for name in names if name not in (about.label, about.prediction)]
        if own:
            sentences.append(f"{', '.join(own)} {'is' if len(own) == 1 else 'are'} the data's own")
        return f"{'; '.join(sentences)}." if sentences else ""

    @property
    def has_tokens(self) -> bool:
        """Whether tokens have scores."""
        return any("tokens" in target for target in self.targets)

    @property
    def data(self) -> str:
        """All that the script shows, as JSON that stands safely inside an element of a page."""
        about = output_of(self.experiment)
        whole = {
            "targets": self.targets,
            "train": self.train,
            "columns": self.columns,
            "drawn": self.drawn,
            "described": self.described,
            "classes": about.labels_are_classes,
            "sides": about.sides,
        }
        return _json(whole)


def _json(value: Any) -> str:
    """Return JSON in which nothing ends an element, or begins one or a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _own(table: pd.DataFrame) -> list[str]:
    """Return the columns that are the study's own."""
    return [name for name in table.columns if name not in RESERVED]


def _values(table: pd.DataFrame, words: Sequence[str]) -> dict[str, list[str]]:
    """Return columns to filter by, as texts: label and prediction by their words, the study's."""
    pairs = [(word, key) for word, key in zip(words, ("label", "prediction"), strict=True) if word]
    named = [*pairs, *((name, name) for name in _own(table))]
    return {word: [label(value) for value in table[key].tolist()] for word, key in named}


def _entries(table: pd.DataFrame, values: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Return what all samples have: id, its address, their values, and the study's as one text."""
    own = _own(table)
    rows = zip(*values.values(), strict=True) if values else (() for _ in table["id"])
    return [
        {
            "key": sample_id,
            "id": str(sample_id),
            "anchor": anchor(sample_id),
            "values": list(row),
            "more": ", ".join(
                f"{name} {value}" for name, value in zip(values, row, strict=True) if name in own
            ),
            "sample": None,
        }
        for sample_id, row in zip(table["id"].tolist(), rows, strict=True)
    ]


def _targets(experiment: File, n_targets: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the first targets, without their influences, and the names of their columns."""
    output = output_of(experiment)
    table = experiment.tables["targets"].head(n_targets)
    values = _values(table, (output.label, output.prediction))
    entries = _entries(table, values)
    several = len(experiment.spec["runs"]) > 1
    for entry, row in zip(entries, rows_with(table), strict=True):
        spread = f" ± {number(row.output_sd, 2)}" if several else ""
        entry["words"] = of_target(row, output)
        entry["f"] = f"{number(row.output)}{spread}"
        entry["output"] = float(f"{row.output:.6g}")
        entry["wrong"] = is_right(row, output) is False
    return entries, list(values)


def _train(
    experiment: File, ids: Sequence[Any], own: pd.Series | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return training samples with their harm, help and self-influence, and names of columns.

    ``places`` are those of a sample among these, from 0, the largest number first.
    """
    output = output_of(experiment)
    table = experiment.tables["train"].set_index("id", drop=False).loc[list(ids)]
    values = _values(table, (output.label, output.prediction))
    entries = _entries(table, values)
    for entry, row in zip(entries, rows_with(table), strict=True):
        entry["words"] = f"{output.label} {label(row.label)}" if output.label else ""
        also = f"{output.prediction} {label(row.prediction)}"
        entry["also"] = also if output.prediction else ""
    numbers = {key: table[key] for key in ("harm", "help") if key in table}
    if own is not None:
        numbers["self-influence"] = own.loc[list(ids)]
    # As in the list of suspects: by all digits, and what is equal in the study's order.
    of_study = experiment.tables["train"]["id"]
    row_of = {sample_id: row for row, sample_id in enumerate(of_study.tolist())}
    rows = [row_of[sample_id] for sample_id in ids]
    for name, column in numbers.items():
        order = np.lexsort((rows, -column.to_numpy()))
        for place, i in enumerate(order.tolist()):
            entries[i].setdefault("places", {})[name] = place
        for entry, value in zip(entries, column.tolist(), strict=True):
            entry[name] = number(value, 2)
    return entries, list(values)


def _rows(
    experiment: File, n_targets: int, own: pd.Series | None, tokens: Tokens | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, list[str]]]:
    """Return the first targets, their training samples, and names of columns; nothing is shown."""
    ids = experiment.tables["targets"]["id"].tolist()[:n_targets]
    influences = experiment.tables["top_influences"]
    is_kept = influences["target_id"].isin(ids) & (influences["rank"] <= EACH_ON_PAGE)
    kept = influences.loc[is_kept, :]
    by_rank = kept.sort_values("rank", kind="stable")["train_id"].tolist()
    train_ids = list(dict.fromkeys([*by_rank, *experiment.attributes["most_harmful"]]))
    targets, target_columns = _targets(experiment, n_targets)
    train, train_columns = _train(experiment, train_ids, own)
    place = {train_id: i for i, train_id in enumerate(train_ids)}
    beside: dict[Any, list[tuple[Any, ...]]] = {target: [] for target in ids}
    ordered = kept.sort_values(["sign", "rank"], ascending=[False, True], kind="stable")
    for row in rows_with(ordered):
        levels: list[Any] = []
        if tokens is not None and (row.target_id, row.train_id) in tokens.train:
            scores = tokens.train[row.target_id, row.train_id]
            levels = [token_levels(scores)]
            entry = train[place[row.train_id]]
            if len(scores) and "tokens" not in entry:
                entry["tokens"] = list(tokens.texts(False, row.train_id, len(scores)))
        beside[row.target_id].append((place[row.train_id], signed(row.score), *levels))
    for entry, target in zip(targets, ids, strict=True):
        entry["influences"] = beside[target]
        if tokens is not None and len(tokens.targets.get(target, ())):
            scores = tokens.targets[target]
            entry["levels"] = token_levels(scores)
            entry["tokens"] = list(tokens.texts(True, target, len(scores)))
    return targets, train, {"targets": target_columns, "train": train_columns}


def explore(
    experiment: File,
    show: Show,
    *,
    drawn: bool,
    described: bool,
    self_influence: pd.Series | None = None,
    tokens: Tokens | None = None,
) -> Answer:
    """Return what a page of 5 MB holds of an experiment.

    All targets, from the first, whose ids, scores and columns fit into half of it; then samples as
    far as they fit: those of the first targets, all targets, and training samples, those of the
    best rank first. Texts are cut to a beginning where that makes room for more. ``show`` shows a
    sample: as a picture if they are ``drawn``, with the study's own words if ``described``.
    ``self_influence`` is that of training samples by id, where it is known.
    """
    n_targets = len(experiment.tables["targets"])
    told = _without_told(experiment, show) if described and not drawn else experiment
    while True:
        targets, train, columns = _rows(told, n_targets, self_influence, tokens)
        n_bytes = len(_json([targets, train]).encode())
        if n_bytes <= _ROWS or n_targets == 1:
            break
        n_targets = max(1, int(0.95 * n_targets * _ROWS / n_bytes))
    # A target that is a mean of others is no sample.
    shown = [] if MEAN_OF in experiment.tables["targets"] else targets
    first = {i for entry in targets[:AT_ONCE] for i, *_ in entry["influences"]}
    asked = [(True, entry) for entry in shown[:AT_ONCE]]
    asked += [(False, train[i]) for i in sorted(first)]
    n_at_once = len(asked)
    asked += [(True, entry) for entry in shown[AT_ONCE:]]
    asked += [(False, entry) for i, entry in enumerate(train) if i not in first]
    pictures = _fill(asked, n_at_once, show, _PAGE - _MARKUP - n_bytes, drawn=drawn)
    _mark_equal(targets, train, output_of(experiment))
    for entry in (*targets, *train):
        del entry["key"]
        entry.pop("digest", None)
    return Answer(experiment, targets, train, columns, pictures, drawn, described)


def _without_told(experiment: File, show: Show) -> File:
    """Return an experiment without columns of phrases that its targets' own texts hold.

    Fields of a question stay in its table, but the text that a template makes of them says them.
    """
    table = experiment.tables["targets"]
    if MEAN_OF in table:
        return experiment
    first = table.head(AT_ONCE)
    own = {name: [str(value).split() for value in first[name]] for name in _own(table)}
    phrases = {name: words for name, words in own.items() if any(len(w) > 1 for w in words)}
    if not phrases:
        return experiment
    texts = [" ".join(str(show(True, i, _CHARACTERS)[0]).split()) for i in first["id"].tolist()]
    told = [
        name
        for name, words in phrases.items()
        if all(" ".join(w) in text for w, text in zip(words, texts, strict=True))
    ]
    return replace(experiment, tables={**experiment.tables, "targets": table.drop(columns=told)})


def _fill(
    asked: Sequence[tuple[bool, dict[str, Any]]],
    n_at_once: int,
    show: Show,
    room: int,
    *,
    drawn: bool,
) -> dict[str, str]:
    """Give entries their samples until the room is full; return the pictures that show at once."""
    samples, used = [], 0
    for is_target, entry in asked:
        shown, entry["digest"] = show(is_target, entry["key"], BEGINNING if drawn else _CHARACTERS)
        samples.append(shown)
        used += _size(samples[-1])
        if used > room and drawn and len(samples) >= n_at_once:
            break
    if used > room and not drawn:
        samples = [readable(str(text), BEGINNING) for text in samples]
    places, used = {}, 0
    for count, ((_, entry), sample) in enumerate(zip(asked, samples, strict=False)):
        used += _size(sample)
        if used > room and count >= n_at_once:
            break
        if isinstance(sample, str):
            entry["sample"] = sample
            continue
        if count < n_at_once:
            places.setdefault(sample.src, f"picture-{len(places)}")
        # The script takes from the page what shows at once.
        source = places.get(sample.src, sample.src)
        entry["sample"] = [source, sample.width, sample.height, sample.text]
    return {place: source for source, place in places.items()}


def _mark_equal(
    targets: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]], about: About
) -> None:
    """Say beside each target which of its training samples are equal; those not shown don't count.

    Equal are samples of one digest, whatever their labels are.
    """
    digests = [entry.get("digest") for entry in train]
    for target in targets:
        beside = [(place, score) for place, score, *_ in target["influences"]]
        counts = Counter(digests[place] for place, _ in beside)
        own, marks = target.get("digest"), dict[int, str]()
        for place, _ in beside:
            digest = digests[place]
            if digest is None:
                continue
            if counts[digest] > 1:
                marks[place] = f"one of {counts[digest]} equal samples here"
            if digest == own:
                marks[place] = ", ".join(filter(None, ("equal to the target", marks.get(place))))
        target["equal"] = marks
        harmful = {place for place, score in beside if not score.startswith("+")}
        is_harmed = any(own and digests[place] == own for place in harmful)
        # A prediction above the label is rightly lowered by the target itself.
        target["equal_harms"] = _EQUAL_HARMS if is_harmed and not about.raises else ""


def _size(sample: Picture | str) -> int:
    text = sample if isinstance(sample, str) else sample.text
    # With a list's quotes and commas; JSON writes some characters as two, or as six.
    picture = len(sample.src) if isinstance(sample, Picture) else 0
    return len(_json(text).encode()) + picture + 20
