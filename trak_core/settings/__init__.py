"""Frozen dataclasses, called specs, with the settings that determine the results of a job."""

from trak_core.settings.projection import (
    ProjectionKind,
    ProjectionSpec,
    matrix_shape,
    stream_of,
    usual_kind,
)
from trak_core.settings.stage_specs import (
    ADAPTER_CONFIG,
    EXACT,
    OPTIMIZER_FILE,
    POOL,
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
    removed_sizes,
    settings_of,
    subset_size,
)

__all__ = ["ADAPTER_CONFIG", "EXACT", "OPTIMIZER_FILE", "POOL", "TRAIN"]
__all__ += ["Combine", "FeaturesSpec", "NormalSpec", "ProjectionKind", "ProjectionSpec"]
__all__ += ["RetrainedSpec", "ScoresSpec", "Setting", "Weighting", "curvature_power"]
__all__ += ["matrix_shape", "ordered", "parse_spec", "projection_of", "removed_sizes"]
__all__ += ["settings_of", "stream_of", "subset_size", "usual_kind"]
