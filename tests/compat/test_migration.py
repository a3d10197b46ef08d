"""The names of the migration page."""

import re

from workspace import REPOSITORY

PAGE = (REPOSITORY / "docs/how-to/from-trak.md").read_text()


def test_every_name_of_the_page_is_there():
    import trak_core.compat as trak

    for name in re.findall(r"`(\w+)`", PAGE.split("## What is the same")[0]):
        if name not in {"trak", "traker", "fast_jl"}:
            assert hasattr(trak, name), name
