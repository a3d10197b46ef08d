"""HDF5 artifacts, format 1: how every file is written, and what a reader makes sure of.

A file is complete under its final name or it is not there. It carries what decided its numbers
(``spec``), what made it (``provenance``), a hash of its content, and at its end one of all its
bytes, which is compared before HDF5 opens it. Matrices lie in pandas' own
*fixed* frame layout, so that ``pandas.read_hdf(path, key)`` gives a labelled frame and h5py sees an
ordinary chunked dataset, ``<key>/block0_values``; they are written block by block.
"""

from trak_core.artifacts.check_consistency import (
    check_made_for,
    check_retrained,
    check_same,
    check_splits,
    check_together,
    made_for,
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
    SCORES_SHARD,
    SELF_INFLUENCE,
    TARGETS,
    TOKEN_SCORES,
    ArtifactError,
    ArtifactKind,
    checkpoint_scores_kind,
    scaled_integers,
)
from trak_core.artifacts.read import Artifact, Rows, open_artifact, read_frame, verify
from trak_core.artifacts.write import Writer, create, software

__all__ = ["check_made_for", "check_retrained", "check_same", "check_splits", "check_together"]
__all__ += ["ANSWERS", "CHECKPOINT_SCORES", "EMBEDDINGS"]
__all__ += ["EVALUATION", "EXACT_SCORES", "FEATURES", "FEATURE_SHARD", "GRAMIAN"]
__all__ += ["OUTPUTS", "TARGETS", "TOKEN_SCORES", "selected_ids"]
__all__ += ["GROUPS", "KINDS", "NORMAL_MATRIX", "REMOVALS", "RETRAINED", "SCORES", "SELF_INFLUENCE"]
__all__ += ["SCORES_SHARD"]
__all__ += ["Artifact", "ArtifactError", "ArtifactKind", "Rows", "Writer"]
__all__ += ["create", "made_for", "open_artifact", "read_frame", "software", "verify"]
__all__ += ["checkpoint_scores_kind", "scaled_integers"]
