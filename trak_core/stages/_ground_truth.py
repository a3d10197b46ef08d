"""Read what retrained models say, of the pipeline's own retraining or of a user's."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import RETRAINED, check_retrained, open_artifact, read_frame
from trak_core.evaluation.lds import GroundTruth, order_models
from trak_core.spec import RetrainedSpec


def read_ground_truth(
    paths: Sequence[Path], train_ids: list[Any], target_ids: list[Any], spec: RetrainedSpec | None
) -> GroundTruth:
    """Return subsets and outputs of all files, with samples in the order of the given ids.

    ``spec`` is what the pipeline's files must be made for; None for one file of a user's.
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
        parts.append(order_models(masks, outputs, train_ids, target_ids, path))
    masks, outputs = zip(*parts, strict=True)
    return GroundTruth(np.concatenate(masks), np.concatenate(outputs, axis=1), source)
