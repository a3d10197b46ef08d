"""Cutting rows into blocks, with a progress bar fit for a log file."""

import time
from collections.abc import Iterator

_WIDTH = 20
_SECONDS = 10.0


def blocks_with_progress(n_rows: int, block: int, what: str) -> Iterator[tuple[int, int]]:
    """Cut ``n_rows`` into blocks and print a line every ten seconds and at the end.

    Args:
        n_rows: How many there are.
        block: Rows of a block, the last one may have fewer.
        what: The plural of what is counted, for the line.

    Yields:
        Start and stop of each block.
    """
    began = printed = time.monotonic()
    for start in range(0, n_rows, block):
        stop = min(start + block, n_rows)
        yield start, stop
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
