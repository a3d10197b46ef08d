"""Read and write artifacts, the HDF5 files in which jobs store their results (format version 2).

A file gets its final name only when it is complete. Besides the results, it contains the settings
that determine them (``spec``), the software and the device that computed them (``provenance``), and
a hash of the whole content. Matrices are stored in pandas' *fixed* layout, so
``pandas.read_hdf(path, key)`` returns them with row and column ids. With h5py, the numbers are read
from ``<key>/block0_values``.
"""

from trak_core.artifacts.check_consistency import (
    check_made_for,
    check_retrained,
    check_same,
    check_splits,
    check_together,
    selected_ids,
)
from trak_core.artifacts.format import (
    ANSWERS,
    CHECKPOINT_SCORES,
    EMBEDDINGS,
    EVALUATION,
    EXACT_SCORES,
    FEATURE_SHARD,
    FEATURES,
    GRAMIAN,
    GROUPS,
    KINDS,
    NORMAL_MATRIX,
    OUTPUTS,
    REMOVALS,
    RETRAINED,
    SCORES,
    SELF_INFLUENCE,
    TARGETS,
    TOKEN_SCORES,
    ArtifactError,
    ArtifactKind,
    scaled_integers,
)
from trak_core.artifacts.read import Artifact, Rows, open_artifact, read_frame, verify
from trak_core.artifacts.write import Writer, create, software

__all__ = ["ANSWERS", "CHECKPOINT_SCORES", "EMBEDDINGS", "EVALUATION", "EXACT_SCORES", "FEATURES"]
__all__ += ["FEATURE_SHARD", "GRAMIAN", "GROUPS", "KINDS", "NORMAL_MATRIX", "OUTPUTS", "REMOVALS"]
__all__ += ["RETRAINED", "SCORES", "SELF_INFLUENCE", "TARGETS", "TOKEN_SCORES", "Artifact"]
__all__ += ["ArtifactError", "ArtifactKind", "Rows", "Writer", "check_made_for", "check_retrained"]
__all__ += ["check_same", "check_splits", "check_together", "create", "open_artifact", "read_frame"]
__all__ += ["scaled_integers", "selected_ids", "software", "verify"]
