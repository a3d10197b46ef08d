"""Flip single bits of artifacts and say what a reader makes of each; run by test_damage.py.

A process of its own: what goes wrong inside an HDF5 library may end it. Reads
[[file, kind, [[position, bit], ...]], ...] as JSON from standard input, and prints one JSON line a
flip: the file, position, bit, and "found", "harmless" or what else happened.
"""

import json
import sys
from pathlib import Path

import h5py
import numpy as np

from trak_core import artifacts
from trak_core.artifacts import ArtifactError, open_artifact


def contents(path, kind):
    """Return all that a reader gets of a file, as one text; NaN and -0 count by their bits."""
    with open_artifact(path, kind) as artifact:
        parts = [artifact.spec, artifact.provenance, artifact.content_hash]
        for key, node in sorted(artifact.file.items()):
            assert artifact.has(key)
            if key in {"spec", "provenance"}:
                continue  # their lists: read above
            if isinstance(node, h5py.Dataset):
                value = artifact.vector(key) if node.shape else np.asarray(artifact.scalar(key))
                parts += [key, value.dtype, value.shape, value.tobytes()]
            elif "table" in node:
                table = artifact.table(key)
                parts += [key, table.dtypes.to_dict(), table.to_dict("list")]
            else:
                values = artifact.matrix(key)[:]
                parts += [key, values.dtype, values.shape, values.tobytes()]
                parts += [artifact.index(key), artifact.columns(key)]
    return repr(parts)


def outcome(path, kind, expected):
    try:
        return "harmless" if contents(path, kind) == expected else "OTHER CONTENT"
    except ArtifactError as error:
        complete = str(error).startswith(f"{path}: ") and "remakes it" in str(error)
        return "found" if complete else f"POOR MESSAGE {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    for path, kind_name, flips in json.load(sys.stdin):
        kind, path = getattr(artifacts, kind_name), Path(path)
        whole = path.read_bytes()
        expected = contents(path, kind)
        # Written over in place: a file of another length would be noticed for that.
        with path.open("r+b") as file:
            for position, bit in flips:
                file.seek(position)
                file.write(bytes([whole[position] ^ 1 << bit]))
                file.flush()
                found = outcome(path, kind, expected)
                print(json.dumps([str(path), position, bit, found]), flush=True)
                file.seek(position)
                file.write(whole[position : position + 1])
                file.flush()
        assert path.read_bytes() == whole


if __name__ == "__main__":
    main()
