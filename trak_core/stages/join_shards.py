"""Join the shards of a split's features into one file."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    FEATURE_SHARD,
    FEATURES,
    Artifact,
    check_made_for,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import FeaturesSpec
from trak_core.stages._shared import PER_SAMPLE

_ROWS = 4096


def _without_shard(spec: dict) -> dict:
    return {key: value for key, value in spec.items() if key != "shard"}


def _check(parts: Sequence[Artifact], spec: FeaturesSpec) -> None:
    """Raise an error unless shards have the settings ``spec``, fit together and are in order."""
    first_row, first = 0, parts[0]
    for number, part in enumerate(parts, start=1):
        check_made_for(part, spec, may_be_shard=True)
        specs = _without_shard(first.spec), _without_shard(part.spec)
        check_same(f"specification of {first.path}", *specs, part)
        stop = first_row + len(part.vector("sample_ids"))
        expected = {"number": number, "of": len(parts), "rows": [first_row, stop]}
        # A file with the features of a whole split has the same format, but no key `shard`.
        shard = part.spec.get("shard") or {}
        check_same("order of shards", expected, {key: shard.get(key) for key in expected}, part)
        samples = first.spec["shard"].get("made_of"), shard.get("made_of")
        check_same(f"samples that {first.path} is a shard of", *samples, part)
        first_row = stop


def join_shards(*, features: Path, shards: Sequence[Path], spec: FeaturesSpec, code: str) -> None:
    """Join the shards of a split's features into the file that one job would have written."""
    with ExitStack() as stack:
        parts = [stack.enter_context(open_artifact(path, FEATURE_SHARD)) for path in shards]
        _check(parts, spec)
        first = parts[0]
        ids = np.concatenate([part.vector("sample_ids") for part in parts])
        sources = [part.provenance for part in parts]
        # If the shards were computed on different machines, the provenance lists all of them.
        provenance = {
            key: ", ".join(sorted({str(source[key]) for source in sources if key in source}))
            for key in sorted(set().union(*sources))
        } | {"join": software(code, "cpu", "numpy")["code"]}
        with create(features, FEATURES, _without_shard(first.spec), provenance) as writer:
            columns, dtype = first.vector("features/axis0"), first.matrix("features").dtype
            values, first_row = writer.matrix("features", ids, columns, dtype=dtype), 0
            for part in parts:
                rows = part.matrix("features")
                for start, stop in blocks_with_progress(len(rows), _ROWS, "samples"):
                    values[first_row + start : first_row + stop] = rows[start:stop]
                first_row += len(rows)
            writer.vector("sample_ids", ids)
            for key in (*PER_SAMPLE, "loss_weights", "curvature"):
                if first.has(key):
                    writer.vector(key, np.concatenate([part.vector(key) for part in parts]))
            if spec.label_draws:
                total = writer.matrix("sampled_normal", columns, columns, dtype=np.float64)
                matrix = first.matrix("sampled_normal")[:]
                for part in parts[1:]:
                    matrix += part.matrix("sampled_normal")[:]
                total[:] = matrix
