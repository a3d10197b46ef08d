"""Show progress as lines in the logs of jobs, and as progress bars elsewhere."""

import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TypeVarTuple

_WIDTH, _SECONDS = 20, 10.0
# The function that `with_progress` calls with the number of rows that were just finished. In a job,
# it is None, and progress is printed as lines.
_advance: ContextVar[Callable[[int], object] | None] = ContextVar("_advance", default=None)

Rest = TypeVarTuple("Rest")


@contextmanager
def reported_to(advance: Callable[[int], object]) -> Generator[None, None, None]:
    """Make ``with_progress`` pass each block's number of rows to ``advance``, not print."""
    token = _advance.set(advance)
    try:
        yield
    finally:
        _advance.reset(token)


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar, which ``advance(n_rows)`` moves forward by ``n_rows``."""

    advance: Callable[[int], object]

    def counting(self) -> AbstractContextManager[None]:
        """Return a context in which ``with_progress`` moves this bar forward."""
        return reported_to(self.advance)

    def silent(self) -> AbstractContextManager[None]:
        """Return a context in which ``with_progress`` neither moves this bar nor prints."""
        return reported_to(lambda n_rows: None)


@contextmanager
def progress_bar(name: str, total: int) -> Generator[Bar, None, None]:
    """Yield a progress bar. Outside terminals and notebooks, it is updated every ten seconds."""
    outer = _advance.get()
    if outer is not None:  # An outer progress bar already counts the rows.
        yield Bar(outer)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Without ipywidgets, tqdm prints a warning in notebooks.
        from tqdm.auto import tqdm

        is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
        interval = 0.1 if is_seen else _SECONDS
        shown = tqdm(total=total, desc=name, unit=" samples", mininterval=interval)
    with shown:
        yield Bar(shown.update)


def print_line(text: str) -> None:
    """Print a line. If a progress bar is shown, it is redrawn below the line."""
    tqdm = sys.modules.get("tqdm")  # It was imported if a progress bar was shown.
    with tqdm.tqdm.external_write_mode(nolock=True) if tqdm else nullcontext():
        print(text, flush=True)


@cache
def notice(text: str) -> None:
    """Print a notice. If the same notice was already printed in this process, do nothing."""
    print_line(f"Notice: {text}")


def log(text: str) -> None:
    """Print a line in a job's log. If a progress bar is shown, print nothing."""
    if _advance.get() is None:
        print_line(text)


def with_progress(
    blocks: Iterable[tuple[int, int, *Rest]], n_rows: int, unit: str
) -> Iterator[tuple[int, int, *Rest]]:
    """Yield the ``blocks``, and print the progress every ten seconds and at the end.

    A block is a tuple that begins with the start and stop index of its rows. ``n_rows`` is the
    total number of rows, and ``unit`` is a word for the rows, such as "samples".
    """
    advance = _advance.get()
    began = printed = time.monotonic()
    for block in blocks:
        yield block
        start, stop = block[:2]
        if advance is not None:
            advance(stop - start)
            continue
        now = time.monotonic()
        if now - printed >= _SECONDS or stop == n_rows:
            printed = now
            bar = "#" * (_WIDTH * stop // n_rows)
            left = (now - began) * (n_rows - stop) / stop
            times = f"{now - began:.0f} s, {left:.0f} s left"
            print(f"[{bar:.<{_WIDTH}}] {stop}/{n_rows} {unit}, {times}", flush=True)


def blocks_with_progress(n_rows: int, block: int, unit: str) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for each block of ``block`` rows, and show progress while iterating."""
    starts = range(0, n_rows, block)
    yield from with_progress(((i, min(i + block, n_rows)) for i in starts), n_rows, unit)
