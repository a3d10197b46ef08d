"""Compute how much every training sample moves the model output on itself."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from trak_core.artifacts import SELF_INFLUENCE, create
from trak_core.spec import ScoresSpec
from trak_core.stages._inputs import self_influences
from trak_core.system.progress import software


def compute_self_influence(
    *,
    self_influence: Path,
    features: Sequence[Path],
    normal_matrices: Sequence[Path],
    spec: ScoresSpec,
    code: str,
    memory_mb: int,
) -> None:
    """Write what ``self_influences`` gives, as a table."""
    columns, _, file_spec = self_influences(features, normal_matrices, spec, memory_mb)
    provenance = software(code, "cpu", "numpy", "scipy", "pandas")
    with create(self_influence, SELF_INFLUENCE, file_spec, provenance) as writer:
        writer.table("train", pd.DataFrame(columns), ["id", "self_influence"])
