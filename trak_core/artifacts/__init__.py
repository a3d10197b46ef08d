"""HDF5 artifacts, format 1: how every file is written, and what a reader makes sure of.

A file is complete under its final name or it is not there. It carries what decided its numbers
(``spec``), what made it (``provenance``) and a hash of its content. Matrices lie in pandas' own
*fixed* frame layout, so that ``pandas.read_hdf(path, key)`` gives a labelled frame and h5py sees an
ordinary chunked dataset, ``<key>/block0_values``; they are written block by block.
"""

from trak_core.artifacts._foreign import read_frame
from trak_core.artifacts._format import (
    CHECKPOINT_SCORES,
    COMPARISON,
    COUNTERFACTUAL,
    DIAGNOSTICS,
    EMBEDDINGS,
    EVALUATION,
    EXACT_SCORES,
    FEATURE_SHARD,
    FEATURES,
    KERNEL,
    MISLABELLED,
    NORMAL_MATRIX,
    RETRAINED,
    SCORES,
    SELF_INFLUENCE,
    ArtifactError,
    Kind,
)
from trak_core.artifacts._join import check_made_for, check_same
from trak_core.artifacts._read import Artifact, open_artifact
from trak_core.artifacts._write import Writer, create

__all__ = [
    "CHECKPOINT_SCORES",
    "COMPARISON",
    "COUNTERFACTUAL",
    "DIAGNOSTICS",
    "EMBEDDINGS",
    "EVALUATION",
    "EXACT_SCORES",
    "FEATURES",
    "FEATURE_SHARD",
    "KERNEL",
    "MISLABELLED",
    "NORMAL_MATRIX",
    "RETRAINED",
    "SCORES",
    "SELF_INFLUENCE",
    "Artifact",
    "ArtifactError",
    "Kind",
    "Writer",
    "check_made_for",
    "check_same",
    "create",
    "open_artifact",
    "read_frame",
]
