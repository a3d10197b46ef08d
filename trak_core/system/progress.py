"""Show how far a stage has come, in lines fit for a log file, and what software it ran."""

import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVarTuple

from trak_core import __version__

_WIDTH = 20
_SECONDS = 10.0

Rest = TypeVarTuple("Rest")


def with_progress(
    blocks: Iterable[tuple[int, int, *Rest]], n_rows: int, what: str
) -> Iterator[tuple[int, int, *Rest]]:
    """Pass blocks of rows on and print a line every ten seconds and at the end.

    Args:
        blocks: Tuples that begin with start and stop, in order.
        n_rows: How many rows there are.
        what: The plural of what is counted, for the line.

    Yields:
        The blocks.
    """
    began = printed = time.monotonic()
    for block in blocks:
        yield block
        stop = block[1]
        now = time.monotonic()
        if now - printed >= _SECONDS or stop == n_rows:
            printed = now
            bar = "#" * (_WIDTH * stop // n_rows)
            seconds = now - began
            left = seconds * (n_rows - stop) / stop
            print(
                f"[{bar:.<{_WIDTH}}] {stop}/{n_rows} {what}, {seconds:.0f} s, {left:.0f} s left",
                flush=True,
            )


def blocks_with_progress(n_rows: int, block: int, what: str) -> Iterator[tuple[int, int]]:
    """Cut ``n_rows`` into blocks and print a line every ten seconds and at the end.

    Args:
        n_rows: How many there are.
        block: Rows of a block, the last one may have fewer.
        what: The plural of what is counted, for the line.

    Yields:
        Start and stop of each block.
    """
    starts = range(0, n_rows, block)
    yield from with_progress(((i, min(i + block, n_rows)) for i in starts), n_rows, what)


# The files that have it are read and parsed, 10 ms each.
_version = cache(version)


def software(
    code: str, device: str, *packages: str, made_from: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return versions, code digest and device as plain values.

    Args:
        code: The stage's code digest.
        device: ``cpu``, or ``cuda`` and the device's name.
        *packages: Distributions that the numbers depend on.
        made_from: Provenance of the files that went in; equal ones are kept once.
    """
    made = {
        "trak-core": __version__,
        "python": platform.python_version(),
        "code": code,
        "device": device,
        **{package: _version(package) for package in packages},
    }
    once = [one for i, one in enumerate(made_from) if one not in made_from[:i]]
    return made | {"made_from": once} if once else made
