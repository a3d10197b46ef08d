"""Show how far a stage has come, in lines fit for a log file."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVarTuple

_WIDTH = 20
_SECONDS = 10.0

Rest = TypeVarTuple("Rest")


def with_progress(
    blocks: Iterable[tuple[int, int, *Rest]], n_rows: int, unit: str
) -> Iterator[tuple[int, int, *Rest]]:
    """Yield blocks of rows, and print a line every ten seconds and at the end.

    Blocks begin with start and stop, in order. The unit is the plural of what is counted.
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
            times = f"{seconds:.0f} s, {seconds * (n_rows - stop) / stop:.0f} s left"
            print(f"[{bar:.<{_WIDTH}}] {stop}/{n_rows} {unit}, {times}", flush=True)


def blocks_with_progress(n_rows: int, block: int, unit: str) -> Iterator[tuple[int, int]]:
    """Yield start and stop of blocks of ``n_rows``, with the lines of ``with_progress``."""
    starts = range(0, n_rows, block)
    yield from with_progress(((i, min(i + block, n_rows)) for i in starts), n_rows, unit)
