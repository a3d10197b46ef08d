"""Keep a small file of each kind of artifact of this version, for every later version to read.

``python tests/support/keep_artifacts.py RESULTS ...`` takes the smallest of each kind from
finished runs, and says which kinds none of them has.
"""

import sys
import tarfile
from pathlib import Path

import trak_core
from trak_core.artifacts import KINDS, ArtifactError, verify

ARCHIVE = Path(__file__).parents[1] / f"data/artifacts/{trak_core.__version__}.tar.xz"


def main(folders: list[str]) -> None:
    smallest: dict[str, Path] = {}
    for path in (path for folder in folders for path in Path(folder).rglob("*.h5")):
        try:
            kind = verify(path)
        except ArtifactError as error:
            print(error)  # of a user, such as measured outputs
            continue
        rule = kind.rule
        if rule not in smallest or path.stat().st_size < smallest[rule].stat().st_size:
            smallest[rule] = path
    if missing := [kind.rule for kind in KINDS if kind.rule not in smallest]:
        sys.exit(f"no file by the rules {', '.join(missing)} in {', '.join(folders)}")
    ARCHIVE.parent.mkdir(exist_ok=True)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as tar:
        for rule, path in sorted(smallest.items()):
            tar.add(path, f"{rule}.h5")
    print(ARCHIVE, ARCHIVE.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
