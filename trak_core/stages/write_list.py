"""Write lists of samples as CSV files: suspects, samples to drop or select, and duplicates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from trak_core.artifacts import FEATURES, SCORES, SELF_INFLUENCE, Artifact, check_same
from trak_core.lists.lists import (
    ENOUGH_TARGETS,
    best_in_turn,
    copies,
    most_consistent,
    most_harmful,
    nearest,
    suspects,
)
from trak_core.model_outputs.about_outputs import about_output
from trak_core.runtime.files import write_csv
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import ScoresSpec
from trak_core.stages._shared import open_made_for


def write_list(
    *,
    listed: Path,
    scores: Path,
    self_influence: Sequence[Path] = (),
    spec: ScoresSpec,
    kind: str,
    fraction: float = 1.0,
    study_file: Path | None = None,
    code: str,
) -> None:
    """Write a list of training samples, which are chosen by the scores of an experiment.

    ``kind`` is ``suspects``, ``drop`` or ``select``. For ``select``, the list contains the given
    ``fraction`` of the training samples, or of the samples in the pool. ``self_influence`` contains
    at most one file, from which the list ``suspects`` gets a column. ``study_file`` is None if
    class names are not needed.
    """
    rule = f"{SCORES.rule}{'_pool' if spec.pool_digest else ''}"
    with open_made_for(scores, replace(SCORES, rule=rule), spec) as file:
        train, top_influences = file.table("train"), file.table("top_influences")
        targets = file.table("targets")
        model_output = file.spec["model_output"]
        about = about_output(model_output)
    for path in self_influence:
        with open_made_for(path, SELF_INFLUENCE, spec.of_self_influence()) as file:
            own = file.table("train")
        check_same("training samples", train["id"].tolist(), own["id"].tolist(), file)
        train["self_influence"] = own["self_influence"]
    if kind == "suspects":
        rows = suspects(train)
        words = "have worth_a_look 1, because they harm more than they help: begin with these"
    elif kind == "select" and about.better == "closer":
        rows, words = most_consistent(train, fraction), "help targets most consistently"
    elif kind == "select":
        rows = best_in_turn(train, top_influences, fraction)
        words = "are chosen by the targets in turn"
    else:
        rows, words = most_harmful(train), "harm targets more than they help"
    n_listed = rows["worth_a_look"].sum() if kind == "suspects" else len(rows)
    _write(listed, rows, ("label", "prediction", "suggested_label"), study_file, model_output)
    print(f"{n_listed} of {len(train)} samples {words}.")
    if kind == "suspects" and len(targets) < ENOUGH_TARGETS:
        n = f"{len(targets)} target{'s' * (len(targets) != 1)}"
        print(
            f"Warning: with only {n}, the order of suspects is uncertain. Use more targets, or "
            f"compare it with the order by {about.worst_fitted}."
        )


def _write(
    listed: Path,
    rows: pd.DataFrame,
    labels: tuple[str, ...],
    study_file: Path | None,
    model_output: str,
) -> None:
    """Write the rows of a list as CSV, with the study's class names in the columns ``labels``.

    If the label is a sequence, such as the tokens of a text, the column contains its length and is
    named after its elements, for example "tokens". If the model output has no labels or
    predictions, their columns are left out.
    """
    if study_file is not None:
        # This module imports torch, which takes seconds, so it is imported only here.
        from trak_core.study.sample_columns import with_class_names

        rows = with_class_names(rows, labels, study_file, model_output)
    about = about_output(model_output)
    words = {"label": about.label, "other_label": about.label, "prediction": about.prediction}
    rows = rows.drop(columns=[name for name, word in words.items() if not word], errors="ignore")
    if about.counts_parts:  # A column keeps its name if another column already has the new name.
        words["other_label"] = f"other_{about.label}"
        rows = rows.rename(columns={k: word for k, word in words.items() if word not in rows})
    write_csv(listed, rows)


_COLUMNS = ("id", "rank", "other_id", "among", "closeness", "cosine", "label", "other_label")


def find_duplicates(
    *,
    listed: Path,
    train_path: Path,
    targets_path: Path,
    spec: ScoresSpec,
    study_file: Path | None = None,
    code: str,
    memory_mb: int,
) -> None:
    """Compare the features of all samples with each other, and list the pairs of duplicates.

    The features are from one checkpoint, and ``spec`` contains the settings of its scores. If a
    target is also a training sample, it is compared only as a training sample. The time is
    quadratic in the number of training samples. ``study_file`` is None if class names are not
    needed.
    """
    with (
        open_made_for(train_path, FEATURES, spec.of_train()) as train,
        open_made_for(targets_path, FEATURES, spec.of_targets()) as new,
    ):
        among = str(spec.experiment)
        parts = [_pairs(train, train, "train", memory_mb), _pairs(train, new, among, memory_mb)]
    pairs = pd.concat(parts, ignore_index=True)
    pairs = pairs.sort_values(["closeness", "cosine"], ascending=False, kind="stable")
    pairs["rank"] = np.arange(1, len(pairs) + 1)
    pairs, labels = pairs.loc[:, list(_COLUMNS)], ("label", "other_label")
    _write(listed, pairs, labels, study_file, spec.features.model_output)
    print(
        f"Duplicates: {len(parts[0])} pairs of training samples, and {len(parts[1])} pairs of a "
        "training sample and a target."
    )


def _pairs(train: Artifact, other: Artifact, among: str, memory_mb: int) -> pd.DataFrame:
    """Return the pairs of duplicates that consist of a training sample and a sample in ``other``.

    Each pair occurs once. Targets that are also training samples are left out.
    """
    features, samples = train.matrix("features"), other.matrix("features")
    # A block of float64 rows from each file must fit into memory, and so must their cosines.
    block = max(64, min(1024, memory_mb * 2**20 // (100 * features.shape[1])))
    blocks: list[tuple[np.ndarray, ...]] = []
    ids, other_ids = (np.array(file.ids("sample_ids"), dtype=object) for file in (train, other))
    labels, other_labels = train.vector("labels"), other.vector("labels")
    row_of = {} if train is other else {sample_id: row for row, sample_id in enumerate(ids)}
    same_id = np.array([row_of.get(sample_id, -1) for sample_id in other_ids])
    same_id[other_labels != labels[same_id]] = -1
    for start, stop in blocks_with_progress(len(samples), 2 * block, f"samples of {among}"):
        first = start if train is other else None
        neighbours = nearest(features, samples[start:stop], block=block, first=first)
        near, *pairs = copies(neighbours, same_id[start:stop])
        blocks.append((near + start, *pairs))
    near, rows, cosines, closeness = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    pairs = pd.DataFrame({"row": rows, "other": near, "cosine": cosines, "closeness": closeness})
    if train is other:  # Each pair can occur twice. The later sample is listed as the duplicate.
        pairs["row"], pairs["other"] = np.maximum(rows, near), np.minimum(rows, near)
        pairs = pairs.sort_values("closeness", ascending=False, kind="stable")
        pairs = pairs.drop_duplicates(["row", "other"])
    rows, near = pairs["row"].to_numpy(), pairs["other"].to_numpy()
    names = {"id": ids[rows], "other_id": other_ids[near], "among": among}
    return pairs.assign(**names, label=labels[rows], other_label=other_labels[near])
