"""Frames in files that users wrote with pandas, read by h5py: nothing is unpickled."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from trak_core.artifacts._format import ArtifactError, plain_ids


def read_frame(path: Path, key: str) -> tuple[np.ndarray, list[Any], list[Any]]:
    """Read a frame of one dtype that ``frame.to_hdf(path, key=key)`` wrote.

    Args:
        path: The file.
        key: The frame's key.

    Returns:
        Values of shape (rows, columns), row ids and column ids.

    Raises:
        ArtifactError: If it is not such a frame.
    """
    how = f"Write it with `frame.to_hdf(path, key={key!r}, format='fixed')`."
    if not path.is_file():
        raise ArtifactError(f"{path}: the file must exist. Found nothing there.")
    try:
        with h5py.File(path, "r") as file:
            parts = [f"{key}/{part}" for part in ("block0_values", "axis1", "axis0")]
            if any(part not in file for part in parts) or f"{key}/block1_values" in file:
                raise ArtifactError(
                    f"{path}: the file must hold a frame {key!r} in pandas' fixed layout, of one "
                    f"dtype. Found {', '.join(file) or 'nothing'}. {how}"
                )
            values, index, columns = (np.asarray(file[part]) for part in parts)
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path}: the file must be readable HDF5. Found {(str(error).splitlines() or [''])[0]}."
        ) from error
    kinds = {index.dtype.kind, columns.dtype.kind}
    if values.dtype.kind not in "biuf" or not kinds <= {"i", "u", "S"} or values.ndim != 2:
        raise ArtifactError(
            f"{path}: the frame {key!r} must hold numbers, under ids that are all integers or "
            f"all strings. Found values of {values.dtype}, ids of {index.dtype} and "
            f"{columns.dtype}. {how}"
        )
    if values.shape != (len(index), len(columns)) or not np.isfinite(values).all():
        raise ArtifactError(
            f"{path}: the frame {key!r} must be whole and finite. Found {values.shape} values for "
            f"{len(index)} rows and {len(columns)} columns, or NaN among them."
        )
    return values, plain_ids(index), plain_ids(columns)
