"""Prepare the data of an experiment's page, which shows its targets and their training samples.

A script in the page shows the targets from these data. If the page would be too large, some samples
are left out, and the page says how many.
"""

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
from trak_core.study.dataset_split import Split
from trak_core.study.sample_columns import RESERVED
from trak_core.study.show_samples import (
    SHORTENED,
    Picture,
    are_drawn,
    contents_digest,
    readable,
    show_sample,
    shown_tokens,
)
from trak_core.study.study import Study

# For each target, the page shows at most EACH_ON_PAGE training samples with a positive score and as
# many with a negative score. It shows the first _FIRST targets until the user clicks the button to
# show all.
EACH_ON_PAGE, _FIRST = 10, 20
# The largest sizes in bytes: of a whole page, of the ids, scores and columns in it, and of its
# markup, style and script.
_PAGE, _ROWS, _MARKUP = 5_000_000, 2_500_000, 100_000
# The largest number of characters of a sample's text. If the page would be too large, texts are
# shortened to SHORTENED characters.
_CHARACTERS = 1000

# A function (is_target, id, characters) that returns the picture or text of a sample, and a digest
# of the sample's contents. ``is_target`` is false for training samples. The text has at most
# ``characters`` characters.
Show = Callable[[bool, Any, int], tuple[Picture | str, bytes]]
# A function (is_target, id, number of tokens) that returns the text of each token of a sample.
Texts = Callable[[bool, Any, int], Sequence[str]]
_EQUAL_HARMS = (
    "A training sample equal to this target is among its most harmful samples. Compare their "
    "labels, or which of their tokens are scored."
)
# The colour of a token has a level from 1 to LEVELS, proportional to its absolute score.
LEVELS = 9


def _scores_by_token(table: pd.DataFrame | None) -> dict[tuple[Any, Any], np.ndarray]:
    """Return arrays that contain a score for each token of a sample.

    The array for the tokens of a training sample has the key (target id, training id). The array
    for the tokens of a target, summed over training samples, has the key (target id, None).
    """
    by_token: dict[tuple[Any, Any], np.ndarray] = {}
    if table is not None:
        keys = ["side", "target_id", "train_id"]
        of_tokens = table.loc[table["token"] >= 0, :].groupby(keys, sort=False)["score"]
        for (side, target, sample), scores in of_tokens:
            key = target, sample if side == "train" else None
            by_token[key] = by_token.get(key, 0) + scores.to_numpy()
    return by_token


def token_levels(scores: np.ndarray) -> list[int]:
    """Return scores as integers, scaled so that the largest absolute value becomes LEVELS."""
    largest = np.abs(scores).max(initial=0) or 1
    return np.rint(LEVELS * scores / largest).astype(int).tolist()


@dataclass(frozen=True, slots=True)
class PageContents:
    """The contents of an experiment's page.

    Attributes:
        experiment: The scores of the experiment, as ``read_experiment`` returns them.
        targets: An entry for each target, with its id, texts, columns, ``sample`` (the picture or
            text) and ``influences``. An influence contains an index in ``train``, a score and, if
            known, the colour levels of the training sample's tokens. If scores by token are known,
            ``tokens`` and ``levels`` contain the texts and colour levels of the target's tokens.
            ``equal`` contains a note for each training sample, by its index in ``train``, whose
            contents equal the target or another sample. ``equal_harms`` is a warning if a copy of
            the target harms the target, else "".
        train: An entry with the id, texts, columns and ``sample`` for each of the training samples
            with the strongest influences on these targets, and for the most harmful ones.
        columns: For "targets" and for "train", the names of the columns whose values each entry
            contains as ``values``, in the same order.
        drawn: Whether samples are shown as pictures.
        described: Whether samples have texts from the study's ``describe``.
    """

    experiment: File
    targets: Sequence[Mapping[str, Any]]
    train: Sequence[Mapping[str, Any]]
    columns: Mapping[str, Sequence[str]]
    drawn: bool
    described: bool

    @property
    def n_left_out(self) -> tuple[int, int]:
        """The number of targets left out, and of samples shown without their picture or text."""
        without = sum(sample["sample"] is None for sample in (*self.targets, *self.train))
        return len(self.experiment.tables["targets"]) - len(self.targets), without

    @property
    def meanings(self) -> str:
        """An explanation of the label, the prediction, and the columns that the study adds."""
        about = output_of(self.experiment)
        sentences = []
        if about.label != "label" and not about.is_own:
            texts = about.columns.removeprefix("label: ").split("; prediction: ")
            pairs = zip((about.label, about.prediction), texts, strict=True)
            sentences += [f"{word}: {text}" for word, text in pairs if word]
        names = dict.fromkeys(name for names in self.columns.values() for name in names)
        further = [name for name in names if name not in (about.label, about.prediction)]
        if "meaning" in self.experiment.attributes:  # Another class was asked about.
            further.remove("own_label")
            sentences.append("own_label: the class of the sample itself")
        if further:
            is_or_are = "is a column" if len(further) == 1 else "are columns"
            sentences.append(f"{', '.join(further)} {is_or_are} of the data")
        return f"{'; '.join(sentences)}." if sentences else ""

    @property
    def data(self) -> str:
        """The data for the page's script, as JSON that is safe inside an HTML element."""
        about = output_of(self.experiment)
        names = ("targets", "train", "columns", "drawn", "described")
        whole = {name: getattr(self, name) for name in names}
        return _json(whole | {"classes": about.labels_are_classes, "sides": about.sides})


def _json(value: Any) -> str:
    """Return a value as JSON in which characters that are special in HTML are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _study_columns(table: pd.DataFrame) -> list[str]:
    """Return the names of the columns that the study added to a table of samples."""
    return [name for name in table.columns if name not in RESERVED]


def _entries(table: pd.DataFrame, about: About) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the page's entry for each row of a table of samples, and the names of ``values``.

    An entry contains the sample's id, its URL fragment, the study's columns as one text, and the
    ``values`` by which the page can filter: label, prediction and the study's columns.
    """
    added = _study_columns(table)
    pairs = ((about.label, "label"), (about.prediction, "prediction"))
    columns = {word: key for word, key in pairs if word} | {name: name for name in added}
    values = {
        word: [label(value) for value in table[key].tolist()] for word, key in columns.items()
    }
    entries = []
    for row, sample_id in enumerate(table["id"].tolist()):
        by_column = {word: texts[row] for word, texts in values.items()}
        more = [f"{name} {value}" for name, value in by_column.items() if name in added and value]
        ids = {"key": sample_id, "id": str(sample_id), "anchor": anchor(sample_id)}
        texts = {"values": list(by_column.values()), "more": ", ".join(more)}
        entries.append(ids | texts | {"sample": None})
    return entries, list(values)


def _targets(experiment: File, n_targets: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the page's entries for the first targets, without influences, and their columns."""
    output = output_of(experiment)
    table = experiment.tables["targets"].head(n_targets)
    entries, names = _entries(table, output)
    several = len(experiment.spec["runs"]) > 1
    for entry, row in zip(entries, rows_with(table), strict=True):
        spread = f" ± {number(row.output_sd, 2)}" if several else ""
        entry["words"] = of_target(row, output)
        entry["f"] = f"{number(row.output)}{spread}"
        entry["output"] = float(f"{row.output:.6g}")
        entry["wrong"] = is_right(row, output) is False
    return entries, names


def _train(
    experiment: File, ids: Sequence[Any], self_influence: pd.Series | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the page's entries for training samples, and the names of their columns.

    An entry contains the harm, help and self-influence of the sample, if they are known. Its
    ``places`` contain the sample's rank by each of these numbers, starting from 0.
    """
    output = output_of(experiment)
    table = experiment.tables["train"].set_index("id", drop=False).loc[list(ids)]
    entries, names = _entries(table, output)
    for entry, row in zip(entries, rows_with(table), strict=True):
        entry["words"] = f"{output.label} {label(row.label)}" if output.label else ""
        also = f"{output.prediction} {label(row.prediction)}"
        entry["also"] = also if output.prediction else ""
    numbers = {key: table[key] for key in ("harm", "help") if key in table}
    if self_influence is not None:
        numbers["self-influence"] = self_influence.loc[list(ids)]
    # Samples with equal numbers are sorted by their row in the study, so that the page and the list
    # of suspects have the same order.
    rows = pd.Index(experiment.tables["train"]["id"]).get_indexer(list(ids))
    for name, column in numbers.items():
        order = np.lexsort((rows, -column.to_numpy()))
        for place, i in enumerate(order.tolist()):
            entries[i].setdefault("places", {})[name] = place
        for entry, value in zip(entries, column.tolist(), strict=True):
            entry[name] = number(value, 2)
    return entries, names


def _rows(
    experiment: File,
    n_targets: int,
    self_influence: pd.Series | None,
    by_token: Mapping[tuple[Any, Any], np.ndarray],
    token_texts: Texts,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, list[str]]]:
    """Return the page's entries for targets and for training samples, and their columns' names."""
    ids = experiment.tables["targets"]["id"].tolist()[:n_targets]
    influences = experiment.tables["top_influences"]
    is_kept = influences["target_id"].isin(ids) & (influences["rank"] <= EACH_ON_PAGE)
    kept = influences.loc[is_kept, :]
    by_rank = kept.sort_values("rank", kind="stable")["train_id"].tolist()
    train_ids = list(dict.fromkeys([*by_rank, *experiment.attributes["most_harmful"]]))
    targets, target_columns = _targets(experiment, n_targets)
    train, train_columns = _train(experiment, train_ids, self_influence)
    place = {train_id: i for i, train_id in enumerate(train_ids)}
    by_target: dict[Any, list[tuple[Any, ...]]] = {target: [] for target in ids}
    ordered = kept.sort_values(["sign", "rank"], ascending=[False, True], kind="stable")
    for row in rows_with(ordered):
        scores, entry = by_token.get((row.target_id, row.train_id)), train[place[row.train_id]]
        levels = [] if scores is None else [token_levels(scores)]
        if scores is not None and len(scores) and "tokens" not in entry:
            entry["tokens"] = token_texts(False, row.train_id, len(scores))
        by_target[row.target_id].append((place[row.train_id], signed(row.score), *levels))
    for entry, target in zip(targets, ids, strict=True):
        entry["influences"] = by_target[target]
        scores = by_token.get((target, None))
        if scores is not None and len(scores):
            entry["levels"] = token_levels(scores)
            entry["tokens"] = token_texts(True, target, len(scores))
    return targets, train, {"targets": target_columns, "train": train_columns}


def explore(
    experiment: File,
    study: Study,
    train: Split,
    targets: Split,
    *,
    token_scores: pd.DataFrame | None = None,
    self_influence: pd.Series | None = None,
) -> PageContents:
    """Return the contents of an experiment's page, limited to about 5 MB.

    Targets are added in order until their ids, scores and columns take half of the page. Then
    pictures or texts of samples are added as long as they fit. The first targets and their training
    samples come first, then the other targets, then the other training samples in the order of
    their best rank for a target. If not all texts fit, texts are shortened.

    ``train`` and ``targets`` contain the samples that the page may show. ``token_scores`` is the
    table ``tokens`` of a file of token scores. ``self_influence`` contains the self-influence of
    training samples, indexed by id.
    """
    splits, drawn, described = (train, targets), are_drawn(study, train), study.has("describe")
    row_of = [{sample_id: row for row, sample_id in enumerate(s.ids)} for s in splits]

    def sample_of(is_target: bool, sample_id: Any) -> Any:
        return splits[is_target].sample(row_of[is_target][sample_id])

    def show(is_target: bool, sample_id: Any, characters: int) -> tuple[Picture | str, bytes]:
        sample = sample_of(is_target, sample_id)
        return show_sample(study, sample_id, sample, characters, drawn), contents_digest(sample)

    def token_texts(is_target: bool, sample_id: Any, n_tokens: int) -> list[str]:
        return shown_tokens(study, sample_id, sample_of(is_target, sample_id), n_tokens)

    by_token, n_targets = _scores_by_token(token_scores), len(experiment.tables["targets"])
    short = _without_repeated(experiment, show) if described and not drawn else experiment
    while True:
        rows = _rows(short, n_targets, self_influence, by_token, token_texts)
        target_entries, train_entries, columns = rows
        n_bytes = len(_json([target_entries, train_entries]).encode())
        if n_bytes <= _ROWS or n_targets == 1:
            break
        n_targets = max(1, int(0.95 * n_targets * _ROWS / n_bytes))
    first = {i for entry in target_entries[:_FIRST] for i, *_ in entry["influences"]}
    asked = [(True, entry) for entry in target_entries[:_FIRST]]
    asked += [(False, train_entries[i]) for i in sorted(first)]
    n_first = len(asked)
    asked += [(True, entry) for entry in target_entries[_FIRST:]]
    asked += [(False, entry) for i, entry in enumerate(train_entries) if i not in first]
    _fill(asked, n_first, show, _PAGE - _MARKUP - n_bytes, drawn=drawn)
    _mark_equal(target_entries, train_entries, output_of(experiment))
    for entry in (*target_entries, *train_entries):
        del entry["key"]
        entry.pop("digest", None)
    return PageContents(experiment, target_entries, train_entries, columns, drawn, described)


def _without_repeated(experiment: File, show: Show) -> File:
    """Return the experiment without columns of targets that repeat parts of the targets' texts.

    All fields of a row become columns. If the study's ``encode`` also puts a field into the text of
    the sample, the page would show the field twice.
    """
    table = experiment.tables["targets"]
    first = table.head(_FIRST)
    split = {name: [str(value).split() for value in first[name]] for name in _study_columns(table)}
    phrases = {name: words for name, words in split.items() if any(len(w) > 1 for w in words)}
    if not phrases:
        return experiment
    texts = [" ".join(str(show(True, i, _CHARACTERS)[0]).split()) for i in first["id"].tolist()]
    repeated = [
        name
        for name, words in phrases.items()
        if all(" ".join(w) in text for w, text in zip(words, texts, strict=True))
    ]
    return replace(
        experiment, tables={**experiment.tables, "targets": table.drop(columns=repeated)}
    )


def _fill(
    asked: Sequence[tuple[bool, dict[str, Any]]],
    n_first: int,
    show: Show,
    n_bytes: int,
    *,
    drawn: bool,
) -> None:
    """Add pictures or texts of samples to their entries, until ``n_bytes`` are used.

    ``asked`` contains pairs (is_target, entry), with the most important first. The samples of the
    first ``n_first`` entries are always added.
    """
    samples, used = [], 0
    for is_target, entry in asked:
        shown, entry["digest"] = show(is_target, entry["key"], SHORTENED if drawn else _CHARACTERS)
        samples.append(shown)
        used += _size(samples[-1])
        if used > n_bytes and drawn and len(samples) >= n_first:
            break
    if used > n_bytes and not drawn:
        samples = [readable(str(text), SHORTENED) for text in samples]
    used = 0
    for count, ((_, entry), sample) in enumerate(zip(asked, samples, strict=False)):
        used += _size(sample)
        if used > n_bytes and count >= n_first:
            break
        entry["sample"] = sample
        if isinstance(sample, Picture):
            entry["sample"] = [sample.src, sample.width, sample.height, sample.text]


def _mark_equal(
    targets: Sequence[dict[str, Any]], train: Sequence[dict[str, Any]], about: About
) -> None:
    """Mark training samples whose contents equal the target or another training sample.

    Labels may differ. Only samples that the page shows for the same target are compared.
    """
    digests = [entry.get("digest") for entry in train]
    for target in targets:
        shown = {place: score for place, score, *_ in target["influences"] if digests[place]}
        counts = Counter(digests[place] for place in shown)
        same = {place for place in shown if digests[place] == target.get("digest")}
        target["equal"] = {}
        for place in shown:
            n_equal = counts[digests[place]]
            marks = ["equal to the target"] * (place in same)
            marks += [f"one of {n_equal} equal samples here"] * (n_equal > 1)
            if marks:
                target["equal"][place] = ", ".join(marks)
        is_harmed = any(not shown[place].startswith("+") for place in same)
        # In regression, training on a copy of the target lowers a prediction that is too high. The
        # copy then has a negative score although it helps, so there is no warning.
        target["equal_harms"] = _EQUAL_HARMS if is_harmed and not about.raises else ""


def _size(sample: Picture | str) -> int:
    text = sample if isinstance(sample, str) else sample.text
    # The size is that of the JSON text, in which some characters take two or six bytes. The 20
    # bytes are for quotes and commas.
    picture = len(sample.src) if isinstance(sample, Picture) else 0
    return len(_json(text).encode()) + picture + 20
