"""Read the weights of a checkpoint with the checksum of its files."""

import hashlib

from trak_core.study.load_checkpoint import read_weights


def read_state_dict(checkpoint):
    """Return a checkpoint's state dict and the SHA-256 of its files."""
    digest = hashlib.sha256()
    return read_weights(checkpoint, digest=digest).state, digest.hexdigest()
