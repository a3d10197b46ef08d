"""Join the shards of a split, in order, into the split's features."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    FEATURE_SHARD,
    FEATURES,
    Artifact,
    check_same,
    create,
    made_for,
    open_artifact,
    software,
)
from trak_core.errors import InputError
from trak_core.spec import FeaturesSpec
from trak_core.system.progress import blocks_with_progress

_ROWS = 4096


def _common(spec: dict) -> dict:
    return {key: value for key, value in spec.items() if key != "shard"}


def _check(parts: Sequence[Artifact], spec: FeaturesSpec) -> None:
    """Refuse shards for another config, and those that the first one doesn't go with, by name."""
    end, first = 0, parts[0]
    for number, part in enumerate(parts, start=1):
        check_same("settings of today's config", *made_for(part, spec), part)
        common = _common(first.spec), _common(part.spec)
        check_same(f"specification of {first.path}", *common, part)
        expected = {"number": number, "of": len(parts), "first row": end}
        # A whole split says nothing of shards; its type is the same.
        shard = part.spec.get("shard") or {"rows": [None]}
        stored = {key: shard.get(key) for key in ("number", "of")}
        stored["first row"] = shard["rows"][0]
        check_same("order of shards", expected, stored, part)
        samples = first.spec["shard"].get("made_of"), shard.get("made_of")
        check_same(f"samples that {first.path} is a shard of", *samples, part)
        n_rows = len(part.vector("sample_ids"))
        check_same("rows of the shard", [end, end + n_rows], shard["rows"], part)
        end += n_rows


def join_shards(*, features: Path, shards: Sequence[Path], spec: FeaturesSpec, code: str) -> None:
    """Write what ``compute_features`` writes of a whole split, from its shards in order."""
    with ExitStack() as stack:
        parts = [stack.enter_context(open_artifact(p, FEATURE_SHARD)) for p in shards]
        if not parts:
            raise InputError("A split must have at least one shard. Found none.")
        _check(parts, spec)
        first = parts[0]
        ids = np.concatenate([part.vector("sample_ids") for part in parts])
        matrix = first.matrix("features")
        columns = first.vector("features/axis0")
        sources = [part.provenance for part in parts]
        # Shards may come from different machines: everything that took part is named.
        provenance = {
            key: ", ".join(sorted({str(source[key]) for source in sources if key in source}))
            for key in sorted(set().union(*sources))
        } | {"join": software(code, "cpu", "numpy")["code"]}
        with create(features, FEATURES, _common(first.spec), provenance) as writer:
            rows = writer.matrix("features", ids, columns, dtype=matrix.dtype)
            offset = 0
            for part in parts:
                values = part.matrix("features")
                for start, stop in blocks_with_progress(len(values), _ROWS, "samples"):
                    rows[offset + start : offset + stop] = values[start:stop]
                offset += len(values)
            writer.vector("sample_ids", ids)
            for key in ("labels", "outputs", "predictions", "loss_weights", "curvature"):
                if first.has(key):
                    writer.vector(key, np.concatenate([part.vector(key) for part in parts]))
