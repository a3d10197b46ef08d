"""Read the tables and numbers for the report from the files of results."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    EVALUATION,
    GROUPS,
    NORMAL_MATRIX,
    REMOVALS,
    SCORES,
    SELF_INFLUENCE,
    Artifact,
    ArtifactKind,
    open_artifact,
)
from trak_core.attribution.model_fit import fit_of
from trak_core.model_outputs.about_outputs import About, about_output
from trak_core.settings import EXACT
from trak_core.study.dataset_split import Split
from trak_core.study.sample_columns import named, with_names

# A loss weight counts as near 0 if its absolute value is below this limit.
NEAR_ZERO = 1e-3
_N_LARGEST = 10
_N_HARMFUL = 100
_CLASSES = ("label", "prediction", "train_label")
# The largest number of rows in the table that compares the experiments by training sample.
_N_SHARED = 30


@dataclass(frozen=True, slots=True)
class File:
    """The part of a file of results that the report shows.

    ``name`` is the path of the file in the results folder, ``spec`` contains the settings with
    which it was computed, and ``provenance`` contains the versions of the software that wrote it.
    ``tables`` and ``attributes`` contain tables, numbers and texts, by name.
    """

    name: str
    content_hash: str
    provenance: Mapping[str, Any]
    spec: Mapping[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def row(self, table: str, **values: Any) -> Any:
        """Return the first row of ``table`` that has these values in its columns, or None."""
        return next(iter(rows_with(self.tables[table], **values)), None)

    def strongest(self, target: Any, sign: int) -> list[Any]:
        """Return the strongest influences on a target with positive (1) or negative (-1) scores."""
        return rows_with(self.tables["top_influences"], target_id=target, sign=sign)


def part_with(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows of a table that have these values in their columns."""
    for column, value in values.items():
        table = table.loc[table[column] == value, :]
    return table


def rows_with(table: pd.DataFrame, **values: Any) -> list[Any]:
    """Return the rows of a table that have these values in their columns, as named tuples."""
    return list(part_with(table, **values).itertuples())


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results that the report shows.

    ``config`` contains the settings that determine the numbers. ``experiments`` contains the scores
    of each experiment, in the order of the config, and ``matrices`` contains the normal matrix of
    each checkpoint. The other fields are empty if nothing was measured. ``evaluations`` and
    ``groups`` map names of experiments to their files. Each file of ``removals`` belongs to an
    experiment or a list of samples. ``self_influence`` contains at most one file.
    """

    config: Mapping[str, Any]
    experiments: Sequence[File]
    matrices: Sequence[File]
    evaluations: Mapping[str, File] = field(default_factory=dict)
    removals: Sequence[File] = ()
    self_influence: Sequence[File] = ()
    groups: Mapping[str, File] = field(default_factory=dict)

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the config requests an evaluation whose results do not exist yet."""
        measured = (self.evaluations, self.removals, self.self_influence)
        return bool(self.config.get("evaluation")) and not any(measured)

    @property
    def spec(self) -> Mapping[str, Any]:
        """The settings of the first experiment. All have the same checkpoints and scoring."""
        return self.experiments[0].spec

    @property
    def n_targets(self) -> int:
        """The number of different target ids in all experiments."""
        return len({i for file in self.experiments for i in file.tables["targets"]["id"]})

    @property
    def is_projected(self) -> bool:
        """Whether gradients are projected."""
        return self.spec["projection"]["kind"] != EXACT

    @property
    def files(self) -> list[File]:
        """All files that the report uses."""
        measured = (*self.evaluations.values(), *self.removals, *self.self_influence)
        scored = (*self.experiments, *self.matrices)
        return [*scored, *measured, *self.groups.values()]


def _file(
    artifact: Artifact, results: Path, tables: Mapping[str, pd.DataFrame], **attributes: Any
) -> File:
    name = artifact.path.relative_to(results).as_posix()
    return File(name, artifact.content_hash, artifact.provenance, artifact.spec, tables, attributes)


def read_experiment(
    path: Path, results: Path, n_shown: int, each: int, train_split: Split | None = None
) -> File:
    """Return the scores of an experiment, with the strongest influences on its first targets.

    For each of the first ``n_shown`` targets, at most ``each`` positive and ``each`` negative
    scores are kept. If the training samples are given as ``train_split``, the attribute ``fit``
    tells how well the models predict them.

    Returns:
        A ``File`` with these tables. The index of ``train`` and ``moved`` contains the positions of
        the samples in the study's training data.

        - ``targets``: all targets.
        - ``shown``: the first ``n_shown`` targets.
        - ``top_influences``: the strongest scores of the first targets.
        - ``train``: the training samples in ``top_influences``, and the most harmful ones.
        - ``moved``: the harm and help of every training sample, if they are known.

        The file has these attributes, besides attributes of the scores file:

        - ``output_words``: JSON that describes the model output if the user defined it, else None.
        - ``one_loss_weight``: whether all loss weights are 1.
        - ``saturated``: the fraction of training samples whose loss weight is near 0.
        - ``n_train``: the number of training samples.
        - ``n_trained_on`` and ``fit``: see the functions ``n_trained_on`` and ``with_fit``.
        - ``influential``: the ids of the training samples in ``top_influences`` of any target.
        - ``most_harmful``: the ids of up to 100 samples that harm targets most.
        - ``n_harmful``: the number of samples that harm more than they help.
    """
    with open_artifact(path, SCORES) as file:
        targets, train = file.table("targets"), file.table("train")
        influences = file.table("top_influences")
        about = about_output(file.spec["model_output"])
        is_own = about.is_own and "model_output" in file.file.attrs
        shown = targets.head(n_shown)
        is_kept = influences["target_id"].isin(shown["id"]) & (influences["rank"] <= each)
        is_beside = train["id"].isin(influences.loc[is_kept, "train_id"])
        most_harmful, n_harmful = [], 0
        moved = train.loc[:, [name for name in ("harm", "help") if name in train]]
        if "harm" in train:
            harmful = train.sort_values("harm", ascending=False, kind="stable").head(_N_HARMFUL)
            most_harmful = harmful.loc[harmful["harm"] > 0, "id"].tolist()
            n_harmful = int(np.count_nonzero(train["harm"] > train["help"]))
        experiment = _file(
            file,
            results,
            {
                "targets": targets,
                "shown": shown,
                "top_influences": influences.loc[is_kept, :],
                "train": train.loc[is_beside | train["id"].isin(most_harmful), :],
                "moved": moved,
            },
            unit=file.attribute("unit"),
            output_words=file.attribute("model_output") if is_own else None,
            one_loss_weight=bool((train["loss_weight"] == 1).all()),
            defaults=file.attribute("defaults"),
            n_train=len(train),
            n_trained_on=n_trained_on(targets, train),
            saturated=float(np.mean(train["loss_weight"].abs() < NEAR_ZERO)),
            influential=influences["train_id"].unique().tolist(),
            most_harmful=most_harmful,
            n_harmful=n_harmful,
        )
        return experiment if train_split is None else with_fit(experiment, train, train_split)


def with_fit(experiment: File, columns: pd.DataFrame, train: Split) -> File:
    """Return an experiment's scores with ``fit``, which tells how well models predict ``train``."""
    fit = fit_of(columns, output_of(experiment), train)
    return replace(experiment, attributes={**experiment.attributes, "fit": fit})


def n_trained_on(targets: pd.DataFrame, train: pd.DataFrame) -> int:
    """Return the number of targets that are also training samples.

    A target counts if a training sample has the same id, the same label and nearly the same model
    output. The id is not enough, because targets and training samples may both be numbered from 0.
    """
    asked = targets.loc[targets["id"].isin(train["id"]), :]
    same = train.set_index("id").loc[asked["id"], :]
    # Outputs of equal samples may differ slightly, because rounding depends on the batch.
    is_near = np.isclose(asked["output"], same["output"], rtol=1e-3, atol=1e-3)
    return int(np.sum(is_near & (asked["label"].to_numpy() == same["label"].to_numpy())))


def output_of(experiment: File) -> About:
    """Return the description of the model output that an experiment explains."""
    name, words = experiment.spec["model_output"], experiment.attributes.get("output_words")
    about = about_output({**json.loads(words), "function": name} if words else name)
    return replace(about, meaning=experiment.attributes.get("meaning", about.meaning))


def with_class_names(file: File, names: Sequence[str]) -> File:
    """Return the file with class numbers in its tables replaced by the names of the classes.

    Numbers without a name and labels that are not classes remain unchanged.
    """
    if not names or not output_of(file).labels_are_classes:
        return file
    by_group = "groups" in file.tables
    tables = {
        key: _groups_with_names(table, names) if by_group else with_names(table, _CLASSES, names)
        for key, table in file.tables.items()
    }
    return replace(file, tables=tables)


def _groups_with_names(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return a table of groups, with names of classes instead of their numbers."""
    is_class = table["column"].isin(["label", "prediction"]).tolist()
    groups = {name: table[name].tolist() for name in ("group", "other") if name in table}
    return table.assign(**{
        name: [named(names, int(v)) if c else v for v, c in zip(values, is_class, strict=True)]
        for name, values in groups.items()
    })


def side_by_side(experiments: Sequence[File]) -> list[dict[str, Any]]:
    """Return the training samples that stand out in at least two experiments, strongest first.

    A sample stands out in an experiment if it is among the strongest samples of a shown target or
    among the 100 most harmful samples. The score of a sample in an experiment is its help minus its
    harm. The strength of a sample is the sum of its |score| over experiments, where each |score| is
    divided by the largest in the experiment.

    Returns:
        A mapping for each sample, with the keys ``id``, ``label`` and ``moved``, a list with
        ``experiment``, ``harm``, ``help``, ``score`` and ``stands_out`` for each experiment. If
        harm and help are unknown, there are no mappings.
    """
    moved = [file.tables["moved"] for file in experiments]
    if len(experiments) < 2 or "harm" not in moved[0]:
        return []
    names = [file.spec["experiment"] for file in experiments]
    known = [file.tables["train"] for file in experiments]
    moved = [table.assign(score=(table["help"] - table["harm"]).astype(float)) for table in moved]
    sizes = [table["score"].abs() for table in moved]
    largest = [max(size.max(), np.finfo(float).tiny) for size in sizes]
    strength = np.sum([size / most for size, most in zip(sizes, largest, strict=True)], axis=0)
    counts = Counter(row for table in known for row in table.index)
    shared = [row for row, count in counts.items() if count > 1]
    samples = []
    for row in sorted(shared, key=lambda row: (-strength[row], row))[:_N_SHARED]:
        # If a whole row were read, pandas would convert an integer id to float.
        where = next(table for table in known if row in table.index)
        sample = {"id": where.at[row, "id"], "label": where.at[row, "label"]}
        sample["moved"] = [
            {"experiment": name, **table.loc[row], "stands_out": row in train.index}
            for name, table, train in zip(names, moved, known, strict=True)
        ]
        samples.append(sample)
    return samples


def read_matrix(path: Path, results: Path) -> File:
    """Return a ``File`` with the smallest and the largest eigenvalue of a normal matrix.

    Eigenvalues that are negative because of rounding are replaced by 0.
    """
    with open_artifact(path, NORMAL_MATRIX) as file:
        numbers = {
            end: max(0.0, file.scalar(f"{end}_eigenvalue")) for end in ("smallest", "largest")
        }
        numbers["mean_squared_norm"] = file.scalar("mean_squared_norm")
        return _file(file, results, {}, **numbers)


def condition_number(matrix: File, damping: float) -> float:
    """Return the condition number of a normal matrix to which the config's damping is added."""
    ends = matrix.attributes
    added = damping * ends["mean_squared_norm"]
    largest, smallest = ends["largest"] + added, ends["smallest"] + added
    # In float64, an eigenvalue below this bound cannot be distinguished from 0.
    return largest / max(smallest, largest * 2.0**-52)


# The names of the tables and of the numbers that the report shows for each kind of file.
_SHOWN = {
    EVALUATION: (
        ("summary", "targets", "checkpoints", "sweep", "best"),
        ("n_subsets", "part_kept", "n_seeds", "n_targets", "confidence"),
    ),
    REMOVALS: (("summary",), ("confidence", "n_trainings", "n_targets")),
    GROUPS: (("groups", "differences"), ("confidence", "n_runs", "n_targets")),
}


def read_measured(path: Path, results: Path, kind: ArtifactKind) -> File:
    """Return the tables and numbers that the report shows of a file of the given ``kind``.

    The kinds are evaluations, removals and groups. Differences between groups are sorted by their
    absolute values, with the largest first.
    """
    keys, names = _SHOWN[kind]
    with open_artifact(path, kind) as file:
        tables = {key: file.table(key) for key in keys if file.has(key)}
        if "differences" in tables:
            tables["differences"] = tables["differences"].sort_values(
                "difference", key=np.abs, ascending=False, kind="stable"
            )
        numbers = {name: file.attribute(name) for name in names if name in file.file.attrs}
        return _file(file, results, tables, **numbers)


def read_self_influence(path: Path, results: Path) -> File:
    """Return the ten training samples with the largest absolute self-influence."""
    with open_artifact(path, SELF_INFLUENCE) as file:
        train = file.table("train")
        by_size = train.sort_values("self_influence", key=np.abs, ascending=False, kind="stable")
        return _file(file, results, {"largest": by_size.head(_N_LARGEST)})
