"""List copies: within the training samples, and of targets among them."""

from pathlib import Path

import numpy as np
import pandas as pd

from trak_core.artifacts import FEATURES, Artifact, check_made_for, open_artifact
from trak_core.scoring.lists import copies, nearest
from trak_core.spec import ScoresSpec
from trak_core.system.files import write_csv
from trak_core.system.progress import blocks_with_progress

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
    """Compare gradients under one checkpoint, all with all, and write the pairs that are copies.

    The time grows with the square of the number of training samples. ``spec`` is that of the
    checkpoint's scores of the targets, and ``study_file`` a study that names classes.
    """
    with open_artifact(train_path, FEATURES) as own, open_artifact(targets_path, FEATURES) as asked:
        check_made_for(own, spec.of_train(), FEATURES.rule)
        check_made_for(asked, spec.of_targets(), FEATURES.rule)
        among = str(spec.experiment)
        parts = [_pairs(own, own, "train", memory_mb), _pairs(own, asked, among, memory_mb)]
    pairs = pd.concat(parts, ignore_index=True)
    pairs = pairs.sort_values(["closeness", "cosine"], ascending=False, kind="stable")
    pairs["rank"] = np.arange(1, len(pairs) + 1)
    pairs = pairs.loc[:, list(_COLUMNS)]
    if study_file is not None:
        # Only here, because it brings torch.
        from trak_core.study.sample_columns import with_class_names

        columns, output = ("label", "other_label"), spec.features.model_output
        pairs = with_class_names(pairs, columns, study_file, output)
    write_csv(listed, pairs)
    print(
        f"{len(parts[0])} pairs of training samples are copies, and {len(parts[1])} with a target."
    )


def _pairs(own: Artifact, other: Artifact, among: str, memory_mb: int) -> pd.DataFrame:
    """Return the training samples that are copies of others, each pair once."""
    features, samples = own.matrix("features"), other.matrix("features")
    n_train, n_others = len(features), len(samples)
    # Rows and samples of a block as float64, and their cosines.
    block = max(64, min(1024, memory_mb * 2**20 // (100 * features.shape[1])))
    found: list[tuple[np.ndarray, ...]] = []
    for start, stop in blocks_with_progress(n_others, 2 * block, f"samples of {among}"):
        neighbours = nearest(
            lambda first, last: features[first:last],
            n_train,
            samples[start:stop],
            block=block,
            first=start if own is other else None,
        )
        near, *pairs = copies(neighbours)
        found.append((near + start, *pairs))
    near, rows, cosines, closeness = (np.concatenate(parts) for parts in zip(*found, strict=True))
    pairs = pd.DataFrame({"row": rows, "other": near, "cosine": cosines, "closeness": closeness})
    if own is other:  # a pair is found from both sides: the later sample is the copy
        pairs["row"], pairs["other"] = np.maximum(rows, near), np.minimum(rows, near)
        pairs = pairs.sort_values("closeness", ascending=False, kind="stable")
        pairs = pairs.drop_duplicates(["row", "other"])
    ids, other_ids = (np.array(file.ids("sample_ids"), dtype=object) for file in (own, other))
    labels, other_labels = own.vector("labels"), other.vector("labels")
    row, position = pairs["row"].to_numpy(), pairs["other"].to_numpy()
    return pairs.assign(
        id=ids[row],
        other_id=other_ids[position],
        among=among,
        label=labels[row],
        other_label=other_labels[position],
    )
