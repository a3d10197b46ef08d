"""Expect that an input is refused: by a code, with the bad values in the message."""

import re
from collections.abc import Generator
from contextlib import contextmanager

import pytest

from trak_core.errors import InputError


@contextmanager
def refused(code: str, *values: object) -> Generator[pytest.ExceptionInfo[InputError]]:
    """Check the error of a block.

    Args:
        code: What ``InputError.code`` must be.
        values: What the message must name, as words by themselves; a pattern must be found in it.
    """
    with pytest.raises(InputError) as caught:
        yield caught
    message = str(caught.value)
    assert caught.value.code == code, message
    for value in values:
        word = rf"(?<!\w){re.escape(str(value))}(?!\w)"
        pattern = value if isinstance(value, re.Pattern) else word
        assert re.search(pattern, message), f"{value!r} is not in: {message}"
