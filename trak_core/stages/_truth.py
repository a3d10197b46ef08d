"""What retrained models say: subsets and outputs, of the pipeline's own retraining or a user's."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import RETRAINED, check_retrained, open_artifact, read_frame
from trak_core.errors import InputError
from trak_core.spec import RetrainedSpec
from trak_core.trust.lds import GroundTruth

_Frame = tuple[np.ndarray, list[Any], list[Any]]


def _columns(frame: _Frame, wanted: Sequence[Any], path: Path, key: str) -> np.ndarray:
    """Return a frame's values with its columns in another order, and no others."""
    values, _, columns = frame
    position = {column: i for i, column in enumerate(columns)}
    missing = [i for i in wanted if i not in position]
    if missing or len(position) < len(columns):
        raise InputError(
            f"{path}: the columns of `{key}` must be the study's ids, each once. Found "
            f"{len(columns)} columns, such as {columns[0] if columns else 'none'!r}, and no "
            f"{', '.join(map(str, missing[:4]))}."
        )
    return values[:, [position[i] for i in wanted]].astype(np.float64)


def _together(
    masks: _Frame, outputs: _Frame, train_ids: list[Any], target_ids: list[Any], path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Put subsets and models of one file in order: masks (S, n), outputs (seeds, S, m)."""
    subsets, of_models = masks[1], outputs[1]
    extra = set(masks[2]) - set(train_ids)
    if extra:
        raise InputError(
            f"{path}: the columns of `masks` must be the training samples of the study. Found "
            f"others, such as {sorted(map(str, extra))[0]}."
        )
    chosen = _columns(masks, train_ids, path, "masks")
    values = _columns(outputs, target_ids, path, "outputs")
    if not np.isin(chosen, (0, 1)).all():
        raise InputError(f"{path}: `masks` must hold 0 and 1 only. Found {chosen.max():g}.")
    rows = {subset: [] for subset in subsets}
    for row, subset in enumerate(of_models):
        if subset not in rows:
            raise InputError(
                f"{path}: every row of `outputs` must be named by its subset, a row of `masks`. "
                f"Found {subset!r}, which is none."
            )
        rows[subset].append(row)
    counts = {len(found) for found in rows.values()}
    if len(rows) < len(subsets) or len(counts) > 1 or 0 in counts:
        raise InputError(
            f"{path}: `masks` must have each subset once, and `outputs` as many models of one as "
            f"of any other. Found {len(subsets)} rows of {len(rows)} subsets, with "
            f"{min(counts, default=0)} to {max(counts, default=0)} models each."
        )
    return chosen, np.stack([values[rows[subset]] for subset in subsets], axis=1)


def read_ground_truth(
    paths: Sequence[Path], train_ids: list[Any], target_ids: list[Any], spec: RetrainedSpec | None
) -> GroundTruth:
    """Read retrained models.

    Args:
        paths: The pipeline's files, or one of a user's.
        train_ids: Ids of the training samples, in order.
        target_ids: Ids of the targets, in order.
        spec: What the pipeline's files must say of themselves; None for a user's.

    Returns:
        Subsets and outputs of all files, one after another.

    Raises:
        InputError: If a file is not what it must be, or about other samples.
    """
    parts, source = [], []
    for path in paths:
        if spec is None:
            masks, outputs = (read_frame(path, key) for key in ("masks", "outputs"))
            digest = hashlib.blake2b(masks[0].tobytes() + outputs[0].tobytes(), digest_size=16)
            source.append(digest.hexdigest())
        else:
            with open_artifact(path, RETRAINED) as file:
                check_retrained(file, spec, RETRAINED.rule)
                masks, outputs = (
                    (file.matrix(key)[:], file.index(key), file.columns(key))
                    for key in ("masks", "outputs")
                )
                source.append(file.content_hash)
        parts.append(_together(masks, outputs, train_ids, target_ids, path))
    return GroundTruth(
        np.concatenate([masks for masks, _ in parts]),
        np.concatenate([outputs for _, outputs in parts], axis=1),
        source,
    )
