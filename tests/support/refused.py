"""Expect that an input is refused: by a code, with the bad values in the message, in given words.

``tests/data/messages/<area>.txt`` has the full wording of each code, which begins with the area. A
message that a test sees must stand there, so that a change of words shows in one place. Run with
TRAK_CORE_UPDATE_MESSAGES=1 and without xdist, all tests of an area write its file anew.
"""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trak_core.errors import InputError

FOLDER = Path(__file__).parents[1] / "data/messages"
UPDATES = os.environ.get("TRAK_CORE_UPDATE_MESSAGES") == "1"
_updated: set[str] = set()


@contextmanager
def refused(code: str, *values: object) -> Generator[pytest.ExceptionInfo[InputError]]:
    """Check the error of a block.

    Args:
        code: What ``InputError.code`` must be.
        values: What the message must name, as words by themselves; a pattern must be found in it.
    """
    with pytest.raises(InputError) as caught:
        yield caught
    message = wording = str(caught.value)
    assert caught.value.code == code, message
    for value in values:
        word = rf"(?<!\w){re.escape(str(value))}(?!\w)"
        pattern = value if isinstance(value, re.Pattern) else word
        assert re.search(pattern, message), f"{value!r} is not in: {message}"
        wording = re.sub(pattern, "<value>", wording)
    wording = re.sub(r"/tmp/[^\s:,]+", "<path>", wording)
    _compare(code, wording.replace("\n", " / "))


def wordings(path: Path) -> dict[str, list[str]]:
    """Return what stands under each code: several lines where a message has several forms."""
    sections: dict[str, list[str]] = {}
    for section in path.read_text().split("\n\n") if path.exists() else ():
        code, *lines = section.strip().splitlines()
        sections[code] = [line.strip() for line in lines]
    return sections


def _compare(code: str, wording: str) -> None:
    path = FOLDER / f"{code.split('.')[0]}.txt"
    sections = wordings(path)
    if UPDATES:
        assert "PYTEST_XDIST_WORKER" not in os.environ, "messages are written by one process"
        known = sections.get(code, []) if code in _updated else []
        _updated.add(code)
        sections[code] = sorted({*known, wording})
        parts = ("\n    ".join([code, *lines]) for code, lines in sorted(sections.items()))
        FOLDER.mkdir(exist_ok=True)
        path.write_text("\n\n".join(parts) + "\n")
    assert wording in sections.get(code, []), (
        f"{path}: these are not the words of {code}: {wording}"
    )
