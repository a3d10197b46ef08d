"""What fits together inside one file: shapes and dtypes."""

import h5py

from trak_core.artifacts._format import Kind


def _dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    found = file.get(name)
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"{name!r} must be a dataset, found {type(found).__name__}")
    return found


def _check_frame(name: str, group: h5py.Group) -> None:
    values, rows, columns, items = (
        _dataset(group, part) for part in ("block0_values", "axis1", "axis0", "block0_items")
    )
    for axis in (rows, columns, items):
        if axis.ndim != 1 or axis.dtype.kind not in "iuS":
            raise ValueError(
                f"{axis.name!r} must be a vector of integers or strings, found shape {axis.shape}, "
                f"dtype {axis.dtype}"
            )
    expected = (rows.size, columns.size)
    if values.shape != expected or items.size != columns.size or values.dtype.kind not in "fiu":
        raise ValueError(
            f"{name!r} must hold numbers of shape {expected}, one row and one column an id, found "
            f"shape {values.shape}, dtype {values.dtype}"
        )


def check_layout(file: h5py.File, kind: Kind) -> None:
    """Compare shapes and dtypes of what a file holds.

    Every frame must have an id a row and an id a column, and each of the kind's ``samples`` one
    entry a sample.

    Raises:
        ValueError: Naming the dataset, what it must be and what it is.
    """
    for name, node in file.items():
        if isinstance(node, h5py.Group) and "block0_values" in node:
            _check_frame(name, node)
    for ids, vectors in kind.samples.items():
        size = _dataset(file, ids).size
        for name in (ids, *vectors):
            if name.split("/")[0] not in file:
                continue
            vector = _dataset(file, name)
            if vector.shape != (size,) or vector.dtype.kind not in "fiubS":
                raise ValueError(
                    f"{name!r} must have one entry for each of the {size} {ids!r}, found shape "
                    f"{vector.shape}, dtype {vector.dtype}"
                )
