"""Frozen descriptions of what to compute; they hold no arrays and import no backend."""

from trak_core.spec.jobs import (
    EXACT,
    OPTIMIZER_FILE,
    TRAIN,
    Combine,
    FeaturesSpec,
    NormalSpec,
    RetrainedSpec,
    ScoresSpec,
    Setting,
    Weighting,
    curvature_power,
    ordered,
    parse_spec,
    projection_of,
    settings_of,
)
from trak_core.spec.projection import (
    ProjectionKind,
    ProjectionSpec,
    matrix_shape,
    stream_of,
    usual_kind,
)

__all__ = [
    "EXACT",
    "OPTIMIZER_FILE",
    "TRAIN",
    "Combine",
    "FeaturesSpec",
    "NormalSpec",
    "ProjectionKind",
    "ProjectionSpec",
    "RetrainedSpec",
    "ScoresSpec",
    "Setting",
    "Weighting",
    "curvature_power",
    "matrix_shape",
    "ordered",
    "parse_spec",
    "projection_of",
    "settings_of",
    "stream_of",
    "usual_kind",
]
