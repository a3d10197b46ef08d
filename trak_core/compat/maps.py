"""The store's files: memory maps that are made whole, and JSON that is replaced whole."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from trak_core.errors import InputError
from trak_core.system.files import written_whole


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file whole."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content), encoding="utf-8")


def write_array(path: Path, values: np.ndarray) -> np.memmap:
    """Replace a ``.npy`` file whole, and return it as a map that may be changed, in memory only."""
    with written_whole(path) as partial:
        array = open_memmap(partial, mode="w+", shape=values.shape, dtype=values.dtype)
        array[:] = values
        array.flush()
    return open_memmap(path, mode="c")


@dataclass(frozen=True, slots=True)
class Map:
    """One memory-mapped ``.npy`` file of the store.

    Attributes:
        path: Where it is.
        shape: What it must have.
        dtype: Likewise.
        fill: What a new one holds.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: Any
    fill: float = 0

    def create(self) -> None:
        """Make the file unless it is there; what it holds stays."""
        if self.path.exists():
            return
        with written_whole(self.path) as partial:
            array = open_memmap(partial, mode="w+", shape=self.shape, dtype=self.dtype)
            if self.fill != 0:
                array[:] = self.fill
            array.flush()

    def open(self, mode: str) -> np.memmap | None:
        """Return the array, or None if there is no file.

        Args:
            mode: ``r``, ``r+``, or ``w+``, which makes the file first if it is missing.

        Raises:
            InputError: If the file is damaged, or of another shape or dtype.
        """
        if mode == "w+":
            self.create()
        if not self.path.exists():
            return None
        try:
            array = open_memmap(self.path, mode="r" if mode == "r" else "r+")
        except ValueError as error:
            raise InputError(
                f"{self.path}: an array of the store must be a whole .npy file. Reading it failed: "
                f"{error}. Delete it and make it again."
            ) from error
        if array.shape != self.shape or array.dtype != self.dtype:
            raise InputError(
                f"{self.path}: the array must be {np.dtype(self.dtype)} of shape {self.shape}. "
                f"Found {array.dtype} of shape {array.shape}. Use the settings it was made with, "
                "or another save_dir."
            )
        return array
