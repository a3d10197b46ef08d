"""Open a finished run as a fitted attributor, which can score new samples."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import torch

from trak_core.artifacts import ANSWERS, open_artifact
from trak_core.attribution.device import Compute, find_device
from trak_core.attribution.fitted_attributor import FittedAttributor, Setup
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.scores import Scores
from trak_core.errors import InputError, caused_by_out_of_memory, disk_full_reason
from trak_core.queries.finished_run import FinishedRun
from trak_core.queries.question_and_answer import Answer, Asked, as_of_class
from trak_core.report.read_results import part_with
from trak_core.runtime.progress import notice
from trak_core.settings import TRAIN
from trak_core.study.as_read import lines_as_read
from trak_core.study.dataset_split import Split, users_code
from trak_core.study.read_targets import encoded_line, split_of
from trak_core.study.sample_columns import columns_of
from trak_core.study.show_samples import short_text, shown_tokens, table_as_html
from trak_core.study.study import Study


class OpenRun(FittedAttributor):
    """A finished run, from which scores are read and with which new samples are scored.

    Scores are read and verified when they are requested. The study and the checkpoints are loaded
    when a sample is scored for the first time, and must be the same as in the run. Checkpoints stay
    in memory if all of them together need at most half of ``compute.memory_mb``.

    Example:
        >>> run = trak_core.open("results")  # doctest: +SKIP
        >>> run.scores("hard").top(3)  # doctest: +SKIP
        >>> run.ask(run.sample(794))  # doctest: +SKIP
    """

    def __init__(self, results: Path, run: FinishedRun | None = None) -> None:
        """Open a results folder. If ``run`` is None, use the last run in the folder."""
        super().__init__()
        self.folder, self._run = results, run
        # The table of the training samples, by id. It is filled when the first answer is computed.
        self.columns = pd.DataFrame()

    @property
    def experiments(self) -> list[str]:
        """The sorted names of the experiments that have scores."""
        return sorted(path.stem for path in (self.folder / "scores").glob("*.h5"))

    def scores(self, experiment: str) -> Scores:
        """Return an experiment's scores.

        If the run stored texts that describe the samples, the tables of samples contain these texts
        in the column ``described_text``.
        """
        path = self.folder / "scores" / f"{experiment}.h5"
        if not path.is_file():
            raise InputError(
                f"{self.folder}: the experiment must have scores. Found none for {experiment}. "
                f"Experiments with scores: {', '.join(self.experiments) or 'none'}.",
                code="artifacts.no_experiment",
            )
        texts = self.folder / "answers" / f"{experiment}.h5"
        if not texts.is_file():
            return Scores.of_file(path, {})
        with open_artifact(texts, ANSWERS) as file:
            tables = {key: file.table(key).set_index("id") for key in ("targets", "train")}
        described = {key: table.add_prefix("described_") for key, table in tables.items()}
        return Scores.of_file(path, described)

    def __repr__(self) -> str:
        """Return the path of the folder and the names of its experiments."""
        return f"Results in {self.folder}: {', '.join(self.experiments) or 'no scores yet'}"

    def _repr_html_(self) -> str:
        """Return a table of the experiments, for Jupyter."""
        known = {name: self.scores(name) for name in self.experiments}
        rows = [(name, len(s.targets), len(s.train), s.unit) for name, s in known.items()]
        columns = ["experiment", "targets", "training samples", "unit of a score"]
        return table_as_html(pd.DataFrame(rows, columns=columns))

    def sample(self, sample_id: int | str, experiment: str | None = None) -> Any:
        """Return the training sample with an id, or the target of an experiment with this id."""
        if experiment is not None:
            return self.target(sample_id, experiment).sample
        if sample_id not in self._row_of_id:
            raise InputError(
                "The id must belong to a training sample or, with the argument `experiment`, to a "
                f"target. Found {sample_id!r}. Training samples have ids such as "
                f"{self._train.ids[0]!r}, and there are {len(self._train.ids)} of them.",
                code="queries.no_sample",
            )
        with self._at_work(), users_code(f"reading sample {sample_id}"):
            return self._train.samples[self._row_of_id[sample_id]]

    def ask(self, asked: Any, k: int = 10, *, tokens: bool = False) -> Answer:
        """Return the training samples that pushed a sample's model output up and down most.

        The scores are the same as in an experiment with this sample as a target. No file is
        written.

        Args:
            asked: A sample as the study returns it, such as a tuple. It can also be an input of the
                study's ``encode``: a dict of fields, or the text of the field ``text``.
            k: The answer contains at most ``k`` training samples with a positive score, and ``k``
                with a negative score.
            tokens: Whether the answer also contains the scores of these samples by token.

        Raises:
            InputError: If the run is not finished, if it used another study, other data or other
                checkpoints, or if the model does not accept the sample.
        """
        ((_, answer),) = self.answers([self.asked(asked)], k, tokens=tokens)
        if isinstance(answer, InputError):
            raise answer
        return answer

    def asked(self, given: Any, number: int = 0) -> Asked:
        """Return a sample to score, with its id and fields.

        A text, or a mapping without arrays, is treated as a line of a data file, which the study
        encodes. A mapping whose keys and types are those of the training samples needs no encoding.
        ``number`` becomes the id of a sample without an id.
        """
        if isinstance(given, Asked):
            return given
        with self._at_work():
            is_line = isinstance(given, str | bytes)
            kinds = _kinds(given)
            if kinds and not any(hasattr(kind, "__array__") for kind in kinds.values()):
                is_line = kinds != _kinds(self.sample(self._train.ids[0]))
            if is_line:
                return Asked(*encoded_line(self.study, given, number))
        return Asked(number, given)

    def as_read(self, asked: Asked) -> list[str]:
        """Return lines of text that show the model's input, if the study has ``as_read``."""
        with self._at_work():
            ids: Any = [asked.id]
            split = Split([asked.sample], ids)
            return lines_as_read(self.study, split, "The first asked sample", self._train)

    def of_class(self, asked: Asked, label: str) -> Asked:
        """Return a sample whose label is replaced by ``label``, the name or number of a class."""
        with self._at_work():
            return as_of_class(asked, label, self.study, self.settings.features.model_output)

    def target(self, target_id: int | str, experiment: str | None = None) -> Asked:
        """Return a target by its id.

        Without ``experiment``, the first experiment that has a target with this id is used. An
        integer id can also be given as a text.
        """
        known = self.run.specs.experiments
        if experiment is not None and experiment not in known:
            raise InputError(
                f"The experiment must be one of those in the config: {', '.join(known)}. Found "
                f"{experiment}.",
                code="queries.no_experiment",
            )
        names = list(known) if experiment is None else [experiment]
        shown: list[str] = []
        with self._at_work():
            for name in names:
                path = self.run.specs.questions.get(name)
                question = None if path is None else Path(path)
                split = split_of(self.study, name, None, question)
                for row, own_id in enumerate(split.ids):
                    if str(own_id) != str(target_id):
                        continue
                    columns = columns_of(self.study, name, [own_id], question)
                    fields = {str(key): values.tolist()[0] for key, values in columns.items()}
                    with users_code(f"reading sample {own_id}"):
                        return Asked(own_id, split.samples[row], fields)
                shown += map(str, split.ids[:2])
        raise InputError(
            f"The id must belong to a target of {', '.join(names)}. Found {target_id}. Targets "
            f"have ids such as {', '.join(dict.fromkeys(shown))}.",
            code="queries.no_target",
        )

    def answers(
        self, asked: Sequence[Asked], k: int = 10, *, tokens: bool = False
    ) -> Iterator[tuple[Asked, Answer | InputError]]:
        """Yield pairs of a sample and its answer, or an error if the sample cannot be scored.

        As many samples as fit in memory are scored together. If checkpoints do not stay in memory,
        each is then read only once for these samples. With ``tokens``, answers also contain scores
        by token. If scores by token cannot be computed, a notice is printed.
        """
        if tokens:
            self._check_projected("Scores by tokens")
        n = len(self._train.ids)
        # A sample needs memory for its scores and, for each checkpoint, for its features or for the
        # inner products with all training gradients.
        width = self.settings.features.projection.get("proj_dim", n)
        n_bytes = 4 * n + 8 * width * len(self.checkpoints)
        answers: Sequence[Answer | InputError] = []
        if not asked:
            return
        try:
            if len(asked) == 1 or len(asked) * n_bytes <= self._compute.memory_mb * 2**17:
                answers = self._answers(asked, k, tokens=tokens)
        except InputError as error:
            answers = [error]
        except Exception as error:
            if len(asked) == 1 and (caused_by_out_of_memory(error) or disk_full_reason(error)):
                raise
            message = f"The model must accept sample {asked[0].id}. It raised "
            message += f"{type(error).__name__}: {error}."
            answers = [InputError(message, code="queries.not_taken")]
        if len(asked) == len(answers):
            yield from zip(asked, answers, strict=True)
            return
        # The samples do not fit in memory, or one of them caused an error. Try each half.
        middle = len(asked) // 2
        for half in (asked[:middle], asked[middle:]):
            yield from self.answers(half, k, tokens=tokens)

    def _answers(self, group: Sequence[Asked], k: int, *, tokens: bool) -> list[Answer]:
        # The ids of several samples can have different types, which a table cannot store. Their
        # positions are therefore used as ids. A single sample keeps its id for error messages.
        ids: Any = [group[0].id] if len(group) == 1 else [*range(len(group))]
        scores = self.score(Split([asked.sample for asked in group], ids), top=k)
        token_scores = self._tokens(group, scores, k) if tokens else None
        targets, answers = scores.targets.to_dict("records"), []
        with self._at_work():
            if self.columns.empty:
                known = scores.train.loc[:, ["label", "prediction", "output", "output_sd"]]
                columns = columns_of(self.study, TRAIN, self._train.ids)
                self.columns = known.join(columns.set_index(known.index))
            for i, asked in enumerate(group):
                influences = part_with(scores.influences, target_id=ids[i])
                train_ids = influences["train_id"].tolist()
                texts = [short_text(self.study, j, self.sample(j)) for j in train_ids]
                answer = Answer(
                    asked,
                    {"id": asked.id, **targets[i]},
                    short_text(self.study, asked.id, asked.sample),
                    scores.frame.iloc[:, i].rename(asked.id),
                    influences.assign(target_id=str(asked.id)),
                    self.columns.loc[train_ids, :].assign(described_text=texts),
                    self.run.specs.config["model_output"],
                    self.study.class_names(),
                    None if token_scores is None else part_with(token_scores, target_id=ids[i]),
                )
                answers.append(answer)
        return answers

    def _tokens(self, group: Sequence[Asked], scores: Scores, k: int) -> pd.DataFrame | None:
        """Return scores by token with texts. If this fails, print a notice and return None."""
        asked_by_id = dict(zip(scores.targets.index, group, strict=True))
        try:
            table, _ = self.tokens(scores, k)
            pairs = table.groupby(["side", "target_id", "train_id"], sort=False).size()
            texts = []
            with self._at_work():
                for side, target_id, train_id, n in pairs.reset_index().itertuples(index=False):
                    asked = asked_by_id[target_id]
                    own = asked.id, asked.sample
                    sample = (train_id, self.sample(train_id)) if side == "train" else own
                    texts += [*shown_tokens(self.study, *sample, n - 1), ""]
            return table.assign(text=texts)
        except InputError as error:
            # After this error, the caller scores fewer samples at a time, which may fit in memory.
            if len(group) > 1 and error.code == "gradients.memory_limit":
                raise
            notice(f"answers will not contain scores by token. {error}")
            return None

    def load(self) -> None:
        """Load the checkpoints before the first sample is scored, if they fit in memory."""
        with self._reading():
            for name in self.checkpoints:
                self._scorer(name)
                if not self._held:
                    return

    @property
    def projection(self) -> dict[str, Any]:
        """The settings of the projection that the run used."""
        with self._open_features(self.checkpoints[0]) as file:
            return file.spec["projection"]

    @cached_property
    def run(self) -> FinishedRun:
        """The run whose results are read."""
        return self._run or FinishedRun.of_folder(self.folder)

    @cached_property
    def study(self) -> Study:
        """The study of the run."""
        with self._at_work():
            return Study.load(Path(self.run.specs.config["study"]))

    @property
    def train(self) -> Split:
        """The training samples of the study."""
        return self._train

    @cached_property
    def _setup(self) -> Setup:  # pyright: ignore[reportIncompatibleVariableOverride]
        specs, compute = self.run.specs, self.run.specs.config["compute"]
        self.run.check_scores()
        device = find_device(compute["device"], projects=specs.is_projected)
        sizes = compute["batch_size"], compute["memory_mb"], torch.get_num_threads()
        with self._at_work():
            train = self.study.split(TRAIN, None)
        spec = specs.self_influence
        return Setup(spec, Compute(device, *sizes), train, self.run.results, self.study)

    @cached_property
    def _row_of_id(self) -> dict[Any, int]:
        return {sample_id: i for i, sample_id in enumerate(self._train.ids)}

    def _at_work(self) -> AbstractContextManager[Any]:
        return contextlib.chdir(self.run.folder)

    def _load(self, name: str) -> LoadedModel:
        spec = self.settings.features.under(name)
        path = self.run.checkpoint(name)
        return LoadedModel.of_study(self.study, path, spec, self._compute.device)

    def _refuse(self, path: Path, keys: Sequence[str]) -> NoReturn:
        self.run.refuse_changed(path, keys)


def _kinds(sample: Any) -> dict[str, type]:
    """Return the type of each value if a sample is a mapping, and otherwise an empty dict."""
    mapping = sample if isinstance(sample, Mapping) else {}
    return {name: type(value) for name, value in mapping.items()}
