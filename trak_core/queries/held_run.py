"""Hold a finished run in memory, its study, checkpoints and training features, and ask it."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution.scores import checkpoint_weights, combined
from trak_core.attribution.token_scores import SIDES, Cut, token_tables
from trak_core.errors import InputError, came_from_no_memory, no_room
from trak_core.queries.finished_run import FinishedRun
from trak_core.queries.held_checkpoint import (
    HeldCheckpoint,
    SampleScores,
    device_of,
    held_checkpoint,
)
from trak_core.queries.question_and_answer import (
    Answer,
    Asked,
    as_of_class,
    asked_of,
    said_of,
    strongest,
)
from trak_core.report.describe_samples import BEGINNING, printed, readable, shown_tokens
from trak_core.spec import TRAIN, Combine
from trak_core.study.dataset_split import Split, users_code
from trak_core.study.read_targets import split_of
from trak_core.study.sample_columns import columns_of
from trak_core.study.study import Study

# A sample's gradient did not fit.
_NO_ROOM = "gradients.memory_limit"


class HeldRun:
    """A finished run that answers further questions with what it has in memory.

    Checkpoints with their training features stay in memory if all of them take at most half of
    ``compute.memory_mb``; the other half is for a sample's gradient. Else they take turns: one is
    in memory, without these features, until ``answers`` needs another.
    """

    def __init__(self, run: FinishedRun, say: Callable[[str], None] = print) -> None:
        """Load the study; ``say`` gets the notice that checkpoints take turns."""
        self.run, self.specs, self._say = run, run.specs, say
        with run.in_folder():
            self.study = Study.load(Path(self.specs.config["study"]))
            self.train = self.study.split(TRAIN, None)
        self._kept, self._held = ExitStack(), dict[str, HeldCheckpoint]()
        # The one that was read last, where they take turns.
        self._last: tuple[str, HeldCheckpoint] | None = None
        self._is_loaded = False
        self._about_train: dict[str, dict[str, np.ndarray]] = {}
        self._told_of_no_tokens = False

    @property
    def takes_turns(self) -> bool:
        """Whether several checkpoints don't stay in memory; known after ``load``."""
        return not self._held and len(self.specs.self_influence.checkpoints) > 1

    def load(self) -> None:
        """Bring the checkpoints into memory, or find out that they have to take turns."""
        if self._is_loaded:
            return
        names = self.specs.self_influence.checkpoints
        with self.run.in_folder(), ExitStack() as stack:
            for name in names:
                checkpoint = stack.enter_context(self._checkpoint(name))
                # All are about as large as the first.
                needed = len(names) * checkpoint.n_bytes + checkpoint.work_bytes
                if needed > self._memory_mb * 2**20 // 2:
                    self._take_turns(f"would take {-(-needed // 2**20)} MiB together")
                    if name == names[0]:
                        self._last, self._kept = (name, checkpoint), stack.pop_all()
                    return
                self._held[name] = checkpoint.in_memory()
            self._kept = stack.pop_all()
        self._is_loaded = True

    def close(self) -> None:
        """Let go of the checkpoints, and of the files that they are read from."""
        self._held, self._last = {}, None
        self._kept.close()
        self._is_loaded = False

    def asked(self, given: Any, number: int = 0) -> Asked:
        """Return a sample from a line, a text, or a sample such as the study's data has."""
        with self.run.in_folder():
            return asked_of(self.study, given, number, self.train.samples)

    def of_class(self, asked: Asked, label: str) -> Asked:
        """Return a sample to explain as of another class, by its name or number."""
        with self.run.in_folder():
            return as_of_class(asked, label, self.study, self.specs.all_features.model_output)

    def target(self, target_id: int | str, experiment: str | None = None) -> Asked:
        """Return a sample to explain: of an experiment, or of the first that has one of this id.

        Ids that are numbers may be given as text.
        """
        names = list(self.specs.experiments) if experiment is None else [experiment]
        shown: dict[str, None] = {}
        with self.run.in_folder():
            for name in names:
                split, question = self._pool(name)
                for i, own_id in enumerate(split.ids):
                    if str(own_id) == str(target_id):
                        columns = columns_of(self.study, name, [own_id], question)
                        fields = {key: columns[key].tolist()[0] for key in columns}
                        with users_code(f"reading sample {own_id}"):
                            return Asked(own_id, split.samples[i], fields)
                shown |= dict.fromkeys(map(str, split.ids[:2]))
        raise InputError(
            f"A target must be one that experiments can have, by its id. Found none {target_id} "
            f"for {', '.join(names)}; there are such as {', '.join(shown)}.",
            code="queries.no_target",
        )

    def sample(self, sample_id: int | str, experiment: str | None = None) -> Any:
        """Return a sample as the study has it: a training sample, or an experiment's target."""
        if experiment is not None:
            return self.target(sample_id, experiment).sample
        if sample_id not in self._places:
            raise InputError(
                "A sample must be a training sample, by its id, or a target, by its id and its "
                f"experiment. Found no training sample {sample_id!r} among {len(self.train.ids)}, "
                f"such as {self.train.ids[0]!r}.",
                code="queries.no_sample",
            )
        with self.run.in_folder():
            return self._train_sample(self._places[sample_id])

    def answers(
        self, asked: Sequence[Asked], k: int = 10, *, tokens: bool = False
    ) -> Iterator[tuple[Asked, Answer | InputError]]:
        """Yield each sample with its answer, ``k`` of either sign, or with what is wrong with it.

        With ``tokens`` the scores of these are cut by tokens, which takes gradients of their
        training samples. Checkpoints that take turns are read once for as many samples as fit, and
        once more for tokens. Where they can't be cut, a notice says why, and the answer is without.
        """
        if tokens and not self.specs.is_projected:
            raise InputError(
                "Scores can be cut by tokens with a projection only. Found `projection: exact`, "
                "which leaves no features. Ask without tokens, or run with a projection.",
                code="queries.exact_tokens",
            )
        self.load()
        n_bytes = 4 * len(self.train.ids) * len(self.specs.checkpoints)
        together = max(1, self._memory_mb * 2**20 // 4 // n_bytes) if self.takes_turns else 1
        for start in range(0, len(asked), together):
            group = asked[start : start + together]
            with self.run.in_folder():
                parts = self._parts(group)
                if self._held and getattr(parts[0], "code", None) == _NO_ROOM:
                    self._take_turns("and the gradient of this sample don't fit together")
                    parts = self._parts(group)
                answers = [self._answer(*pair, k) for pair in zip(group, parts, strict=True)]
                if tokens:
                    answers = self._with_tokens(answers, parts)
            yield from zip(group, answers, strict=True)

    @cached_property
    def columns(self) -> pd.DataFrame:
        """What is known of the training samples by id, as a scores file's table ``train``.

        It is known after the first answer.
        """
        ends = [self._about_train[name] for name in self.specs.self_influence.ends]
        predictions, outputs = ([end[key] for end in ends] for key in ("predictions", "outputs"))
        columns = said_of(ends[0]["labels"], predictions, outputs)
        own = columns_of(self.study, TRAIN, self.train.ids)
        return pd.DataFrame(columns).join(own).set_index(pd.Index(self.train.ids, name="id"))

    @property
    def projection(self) -> dict[str, Any]:
        """What the scores files of the run say of the projection."""
        (name, *_) = self.specs.self_influence.checkpoints
        with open_artifact(self.run.train_file(name), FEATURES) as file:
            return {key: value for key, value in file.spec["projection"].items() if key != "stream"}

    @property
    def _memory_mb(self) -> int:
        return self.specs.config["compute"]["memory_mb"]

    @cached_property
    def _places(self) -> dict[Any, int]:
        return {sample_id: i for i, sample_id in enumerate(self.train.ids)}

    @cached_property
    def _device(self) -> torch.device:
        name = self.specs.config["compute"]["device"]
        return device_of(name, is_projected=self.specs.is_projected)

    def _take_turns(self, why: str) -> None:
        self.close()
        self._is_loaded = True
        n_checkpoints = len(self.specs.self_influence.checkpoints)
        half = f"(compute.memory_mb is {self._memory_mb}, half of it for a gradient)"
        if n_checkpoints > 1:
            self._say(
                f"Notice: checkpoints take turns, because all {n_checkpoints} {why} {half}. Every "
                "question reads them again; questions of one file are answered together."
            )
        elif self.specs.is_projected:
            self._say(
                "Notice: every question reads the training samples' features again, because these "
                f"with the checkpoint {why} {half}."
            )

    def _checkpoint(self, name: str) -> AbstractContextManager[HeldCheckpoint]:
        return held_checkpoint(self.run, name, self.study, self.train, self._device)

    def _in_turn(self, name: str) -> HeldCheckpoint:
        """Return a checkpoint, read if it isn't the one that was read last."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._kept.close()
            self._last = name, self._kept.enter_context(self._checkpoint(name))
        return self._last[1]

    def _pool(self, experiment: str) -> tuple[Split, Path | None]:
        """Return the samples that an experiment picks its targets from, and their file."""
        if experiment not in self.specs.experiments:
            raise InputError(
                f"An experiment must be one of the config's: {', '.join(self.specs.experiments)}. "
                f"Found {experiment}.",
                code="queries.no_experiment",
            )
        own = self.specs.questions.get(experiment)
        question = None if own is None else Path(own)
        return split_of(self.study, experiment, None, question), question

    def _train_sample(self, place: int) -> Any:
        with users_code(f"reading sample {self.train.ids[place]}"):
            return self.train.samples[place]

    def _parts(self, group: Sequence[Asked]) -> list["_Parts | InputError"]:
        """Return what all checkpoints say of each sample, one checkpoint after the other."""
        parts: list[_Parts | InputError] = [_Parts() for _ in group]
        for name, checkpoint, memory_mb in self._checkpoints():
            self._about_train[name] = checkpoint.about_train
            for i, (asked, so_far) in enumerate(zip(group, parts, strict=True)):
                if isinstance(so_far, InputError):
                    continue
                try:
                    so_far.add(name, checkpoint, checkpoint.score_sample(asked.split, memory_mb))
                except InputError as error:
                    parts[i] = error
                except Exception as error:
                    if came_from_no_memory(error) or no_room(error):
                        raise
                    parts[i] = _not_taken(asked, error)
            del checkpoint  # before the next is read
        return parts

    def _checkpoints(self) -> Iterator[tuple[str, HeldCheckpoint, int]]:
        """Yield each checkpoint, held or read, and the MiB that a gradient may take beside it."""
        for name in self.specs.self_influence.checkpoints:
            if name in self._held:
                yield name, self._held[name], self._memory_mb // 2
            else:
                yield name, self._in_turn(name), self._memory_mb

    def _with_tokens(
        self, answers: Sequence[Answer | InputError], parts: Sequence["_Parts | InputError"]
    ) -> list[Answer | InputError]:
        """Return answers with their scores cut by tokens, one checkpoint after the other.

        An answer that can't be cut stays as it is, and a notice says why.
        """
        cut = {i: answer for i, answer in enumerate(answers) if isinstance(answer, Answer)}
        cuts: list[list[tuple[Cut, Cut]]] = [[] for _ in answers]
        for name, checkpoint, memory_mb in self._checkpoints():
            for i, answer in list(cut.items()):
                split, said = answer.asked.split, parts[i]
                if answer.top.empty or not self._has_tokens(checkpoint, split):
                    del cut[i]
                    continue
                assert isinstance(said, _Parts)
                places = [self._places[train_id] for train_id in answer.top["train_id"]]
                given = self.train, places, split, said.features[name], memory_mb
                try:
                    cuts[i].append(checkpoint.cut(*given))
                except InputError as error:
                    if self._held and error.code == _NO_ROOM:
                        self._take_turns("and gradients by tokens don't fit together")
                        return self._with_tokens(answers, parts)
                    self._say_uncut(cut.pop(i), error)
            del checkpoint  # as above
        whole = list(answers)
        for i, answer in cut.items():
            said = parts[i]
            assert isinstance(said, _Parts)
            try:
                whole[i] = self._cut_answer(answer, said, cuts[i])
            except InputError as error:
                self._say_uncut(answer, error)
        return whole

    def _has_tokens(self, checkpoint: HeldCheckpoint, split: Split) -> bool:
        """Return whether a sample's scores can be cut by tokens; say once that they can't."""
        if checkpoint.has_tokens(split):
            return True
        if not self._told_of_no_tokens:
            self._told_of_no_tokens = True
            self._say(
                "Notice: answers come without tokens, because samples of this study have none: "
                "only texts can be cut by them."
            )
        return False

    def _say_uncut(self, answer: Answer, error: InputError) -> None:
        self._say(f"Notice: the answer for {answer.asked.id} comes without tokens: {error}")

    def _cut_answer(
        self, answer: Answer, parts: "_Parts", cuts: Sequence[tuple[Cut, Cut]]
    ) -> Answer:
        """Return an answer with the sums of its cuts over checkpoints, and texts for its tokens."""
        places = [self._places[train_id] for train_id in answer.top["train_id"]]
        powers = np.stack([weights[places] for _, weights, _ in parts.terms])
        norms = np.array([norm for *_, norm in parts.terms])
        counts = checkpoint_weights(powers, norms, Combine(self.specs.self_influence.combine))
        top = answer.top[["train_id"]].assign(target_id=answer.asked.id)
        table, _ = token_tables(top, cuts, counts)
        rows = []
        for side, train_id in itertools.product(SIDES, top["train_id"]):
            sample_id, sample = answer.asked.id, answer.asked.sample
            if side == "train":
                sample_id, sample = train_id, self._train_sample(self._places[train_id])
            own = table.loc[(table["side"] == side) & (table["train_id"] == train_id), :]
            texts = shown_tokens(self.study, sample_id, sample, len(own) - 1)
            rows.append(own.assign(text=[*texts, ""]))
        return replace(answer, tokens=pd.concat(rows, ignore_index=True))

    def _answer(self, asked: Asked, parts: "_Parts | InputError", k: int) -> Answer | InputError:
        if isinstance(parts, InputError):
            return parts
        spec = self.specs.self_influence
        scores = combined(parts.terms, Combine(spec.combine))[:, 0].astype(np.float32)
        ends = [parts.columns[name] for name in spec.ends]
        # Label, output and prediction, each of shape (1,).
        labels, outputs, predictions = (list(column) for column in zip(*ends, strict=True))
        target = {"id": asked.id} | {
            key: value[0] for key, value in said_of(labels[0], predictions, outputs).items()
        }
        places = strongest(scores, k)
        ids = [self.train.ids[place] for place in places]
        try:
            text = self._text(asked.id, asked.sample)
            texts = [self._text(self.train.ids[i], self._train_sample(i)) for i in places]
        except InputError as error:
            return error
        top = pd.DataFrame({"train_id": ids, "score": scores[places]})
        top = top.join(self.columns, on="train_id").assign(described_text=texts)
        return Answer(
            asked,
            target,
            text,
            pd.Series(scores, self.columns.index, name=asked.id),
            top,
            self.specs.config["model_output"],
            self.study.class_names(),
        )

    def _text(self, sample_id: int | str, sample: Any) -> str:
        """Return the beginning of a sample's text on one line, or what is printed of it."""
        if not self.study.has("describe"):
            return printed(sample)
        return " ".join(readable(self.study.describe(sample_id, sample), BEGINNING).split())


def _not_taken(asked: Asked, error: Exception) -> InputError:
    """Return what a model's own error says of a sample, such as a text beyond its positions."""
    tokens = asked.sample.get("input_ids") if isinstance(asked.sample, Mapping) else None
    n_tokens = 0 if tokens is None else torch.as_tensor(tokens).numel()
    longer = f", a text of {n_tokens} tokens; is it longer than the model takes?"
    reason = str(error).partition("\n")[0]
    return InputError(
        f"The model must take each sample that is asked about. Found {type(error).__name__} "
        f"({reason}) for sample {asked.id}{longer if n_tokens else '.'}",
        code="queries.not_taken",
    )


class _Parts:
    """What checkpoints say of one sample.

    Attributes:
        terms: For each checkpoint, what ``combined`` takes.
        columns: By checkpoint, the sample's label, output and prediction, shape (1,) each.
        features: By checkpoint, the sample's features, shape (1, k), where there are some.
    """

    def __init__(self) -> None:
        self.terms: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.columns: dict[str, list[np.ndarray]] = {}
        self.features: dict[str, np.ndarray] = {}

    def add(self, name: str, checkpoint: HeldCheckpoint, scored: SampleScores) -> None:
        """Add one more checkpoint."""
        similarities, columns, features = scored
        if features is not None:
            self.features[name] = features
        self.terms.append((similarities, checkpoint.weights, checkpoint.norm))
        self.columns[name] = [column.cpu().numpy() for column in columns[:3]]
