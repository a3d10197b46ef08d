"""Save weights, and read those of a checkpoint with the checksum of its files."""

import hashlib

import torch
from safetensors.torch import save_file

from trak_core.study.load_checkpoint import read_weights


def save(value, path):
    """Write a file in the format of its suffix, and return its path."""
    if path.suffix == ".safetensors":
        save_file(value, path, metadata={"format": "pt"})  # as from_pretrained needs it
    else:
        torch.save(value, path)
    return path


def read_state_dict(checkpoint):
    """Return a checkpoint's state dict and the SHA-256 of its files."""
    digest = hashlib.sha256()
    return read_weights(checkpoint, digest=digest).state, digest.hexdigest()
