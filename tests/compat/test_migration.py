"""Run the code of the migration page, and compare its output."""

import contextlib
import io
import re

from workspace import REPOSITORY

PAGE = (REPOSITORY / "docs/how-to/from-trak.md").read_text()


def blocks(info):
    return re.findall(rf"^```{info}\n(.*?)^```", PAGE, flags=re.S | re.M)


def test_the_code_of_the_page_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("python")
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, names)
    assert [printed.getvalue()] == blocks("text")
    assert names["scores"].shape == (500, 10)


def test_every_name_of_the_page_is_there():
    import trak_core.compat as trak

    for name in re.findall(r"`(\w+)`", PAGE.split("## A whole example")[0]):
        if name not in {"trak", "traker", "fast_jl"}:
            assert hasattr(trak, name), name
