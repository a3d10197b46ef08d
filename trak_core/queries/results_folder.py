"""Look at a run's results from a notebook as pandas, and ask the run about further samples."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trak_core.artifacts.format import ANSWERS, SCORES
from trak_core.artifacts.read import Artifact, open_artifact
from trak_core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from trak_core.queries.held_run import HeldRun
    from trak_core.queries.question_and_answer import Answer


@dataclass(frozen=True)
class ResultsFolder:
    """The results of a run, read when they are asked for; every file is verified.

    The first ``ask`` brings the study, its checkpoints and the training features into memory, where
    they stay as long as this object.

    Example:
        >>> results = trak_core.open("results")  # doctest: +SKIP
        >>> results.top("hard", 905)  # doctest: +SKIP
        >>> results.ask(results.sample(794))  # doctest: +SKIP
    """

    folder: Path

    @property
    def experiments(self) -> list[str]:
        """Names of the experiments that have scores, sorted."""
        return sorted(path.stem for path in (self.folder / "scores").glob("*.h5"))

    def scores(self, experiment: str) -> "pd.DataFrame":
        """Return all scores, float32: a row a training sample, a column a target, by id.

        Raises:
            InputError: If the run kept the top influences alone (``scoring.keep: top_k``).
        """
        import pandas as pd

        with open_artifact(self._path(experiment), SCORES) as file:
            if not file.has("scores"):
                raise InputError(
                    f"{file.path}: all scores must have been kept. Found the top influences alone, "
                    "as with `scoring.keep: top_k`. Take top() or reverse(), or set `keep: full`.",
                    code="artifacts.no_matrix",
                )
            index, columns = file.index("scores"), file.columns("scores")
            return pd.DataFrame(file.matrix("scores")[:], index, columns)

    def targets(self, experiment: str) -> "pd.DataFrame":
        """Return the targets by id: labels, predictions, outputs, and the study's columns."""
        return self._table(experiment, "targets")

    def train(self, experiment: str) -> "pd.DataFrame":
        """Return the training samples by id, likewise, with their ``help`` and ``harm``."""
        return self._table(experiment, "train")

    def top(self, experiment: str, target_id: Any, k: int = 10) -> "pd.DataFrame":
        """Return the ``k`` training samples that pushed a target up most, and down most.

        Rows are ordered by score, the largest first: train_id, score, what the table ``train``
        says of the sample, and its text where the study describes samples.
        """
        with open_artifact(self._path(experiment), SCORES) as file:
            influences = file.table("top_influences")
        self._check_id(experiment, "targets", target_id)
        is_asked = (influences["target_id"] == target_id) & (influences["rank"] <= k)
        influences = influences.loc[is_asked, ["train_id", "score"]]
        influences = influences.sort_values("score", ascending=False, kind="stable")
        joined = influences.join(self.train(experiment), on="train_id")
        return joined.join(self._texts(experiment, "train"), on="train_id").reset_index(drop=True)

    def reverse(self, experiment: str, train_id: Any) -> "pd.DataFrame":
        """Return the targets that a training sample pushed, up most first, down most last.

        All targets, or those that have it among their top influences where the run kept no others.
        """
        self._check_id(experiment, "train", train_id)
        with open_artifact(self._path(experiment), SCORES) as file:
            if file.has("scores"):
                scores = _scores_of(file, train_id)
            else:
                table = file.table("top_influences")
                scores = table.loc[table["train_id"] == train_id, ["target_id", "score"]]
        scores = scores.sort_values("score", ascending=False, kind="stable")
        joined = scores.join(self.targets(experiment), on="target_id")
        return joined.join(self._texts(experiment, "targets"), on="target_id").reset_index(
            drop=True
        )

    def sample(self, sample_id: Any, experiment: str | None = None) -> Any:
        """Return a sample as the study has it: a training sample, or a target of an experiment.

        It can be changed, and asked about.
        """
        return self._held.sample(sample_id, experiment)

    def ask(self, asked: Any, k: int = 10, *, tokens: bool = False) -> "Answer":
        """Return which training samples pushed a sample up and down, ``k`` of either sign.

        The scores are those of an experiment with this target. Nothing is written. ``asked`` is a
        sample as the study has them (a tuple, or a dict with a tensor); or what its ``encode``
        takes: the fields of a line of an experiment's ``data``, or a text for the field ``text``.
        With ``tokens`` the answer's scores are cut by tokens as well.

        Raises:
            InputError: If the run is not finished, or not of today's study, data and checkpoints;
                or if the sample is not one that the study's model takes.
        """
        ((_, answer),) = self._held.answers([self._held.asked(asked)], k, tokens=tokens)
        if isinstance(answer, InputError):
            raise answer
        return answer

    @cached_property
    def _held(self) -> "HeldRun":
        # Only who asks needs torch.
        from trak_core.queries.finished_run import FinishedRun
        from trak_core.queries.held_run import HeldRun

        return HeldRun(FinishedRun.of_folder(self.folder))

    def _path(self, experiment: str) -> Path:
        path = self.folder / "scores" / f"{experiment}.h5"
        if not path.is_file():
            raise InputError(
                f"{self.folder}: an experiment must have scores there. Found none of {experiment}; "
                f"there are {', '.join(self.experiments) or 'none'}.",
                code="artifacts.no_experiment",
            )
        return path

    def _table(self, experiment: str, key: str) -> "pd.DataFrame":
        with open_artifact(self._path(experiment), SCORES) as file:
            return file.table(key).set_index("id")

    def _check_id(self, experiment: str, key: str, sample_id: Any) -> None:
        known = self._table(experiment, key).index
        if sample_id not in known:
            raise InputError(
                f"{self._path(experiment)}: a sample must be in the table {key!r}. Found none "
                f"{sample_id!r} among {len(known)}, such as {known[0]!r}.",
                code="artifacts.no_sample",
            )

    def _texts(self, experiment: str, key: str) -> "pd.DataFrame":
        """Return texts by id; a frame without columns where the run has none."""
        import pandas as pd

        path = self.folder / "answers" / f"{experiment}.h5"
        if not path.is_file():
            return pd.DataFrame()
        with open_artifact(path, ANSWERS) as file:
            return file.table(key).set_index("id").add_prefix("described_")

    def __repr__(self) -> str:
        """Return the folder and its experiments, in words."""
        return f"Results in {self.folder}: {', '.join(self.experiments) or 'no scores yet'}"

    def _repr_html_(self) -> str:
        """Return a table of the experiments, for Jupyter."""
        import pandas as pd

        rows = []
        for name in self.experiments:
            with open_artifact(self._path(name), SCORES) as file:
                sizes = len(file.table("targets")), len(file.table("train"))
                rows.append((name, *sizes, file.attribute("n_checkpoints"), file.attribute("unit")))
        columns = ["experiment", "targets", "training samples", "checkpoints", "unit of a score"]
        return pd.DataFrame(rows, columns=columns).to_html(index=False)


def _scores_of(file: Artifact, train_id: Any) -> "pd.DataFrame":
    import pandas as pd

    row = file.index("scores").index(train_id)
    values = file.matrix("scores")[row : row + 1][0]
    return pd.DataFrame({"target_id": file.columns("scores"), "score": values})
