"""Frozen descriptions of what to compute; they hold no arrays and import no backend."""

from trak_core.spec.jobs import (
    EXACT,
    OPTIMIZER_FILE,
    Combine,
    FeaturesSpec,
    NormalSpec,
    RetrainedSpec,
    ScoresSpec,
    Spec,
    Weighting,
    curvature_power,
    made_of,
    ordered,
    projection_of,
)
from trak_core.spec.projection import (
    Kind,
    ProjectionKind,
    ProjectionSpec,
    matrix_shape,
    stream_of,
    usual_kind,
)

__all__ = [
    "EXACT",
    "OPTIMIZER_FILE",
    "Combine",
    "FeaturesSpec",
    "Kind",
    "NormalSpec",
    "ProjectionKind",
    "ProjectionSpec",
    "RetrainedSpec",
    "ScoresSpec",
    "Spec",
    "Weighting",
    "curvature_power",
    "made_of",
    "matrix_shape",
    "ordered",
    "projection_of",
    "stream_of",
    "usual_kind",
]
