"""The migration page is run: its code, and the output it shows."""

import contextlib
import io
import re

import pandas as pd
from workspace import REPOSITORY

PAGE = (REPOSITORY / "docs/migration.md").read_text()


def blocks(info):
    return re.findall(rf"^```{info}\n(.*?)^```", PAGE, flags=re.S | re.M)


def test_the_code_of_the_page_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text("def make_model(): ...\n")
    example, to_pipeline, from_pipeline = blocks("python")
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, names)
    assert [printed.getvalue()] == blocks("text")
    assert names["scores"].shape == (500, 10)
    exec(to_pipeline, names)
    frame = pd.read_hdf("results/features/run1/train.h5", "features")
    assert frame.shape == (500, 128)
    exec(from_pipeline, names)
    assert pd.read_hdf("trak_results/artifacts/features/0/ten.h5", "features").shape == (10, 128)


def test_every_name_of_the_page_is_there():
    import trak_core.compat as trak

    for name in re.findall(r"`(\w+)`", PAGE.split("## A whole example")[0]):
        if name not in {"trak", "traker", "fast_jl"}:
            assert hasattr(trak, name), name
