"""The page on planted facts is followed: its run finds them, and the models know them."""

import re
import shutil

import pandas as pd
from pages import blocks, follow
from report_page import Page
from workspace import FORKS, REPOSITORY, Workspace

from trak_core.study.study import Study


def ranks_of(workspace):
    """Mean reciprocal ranks of the better planted text, by how it is asked for."""
    questions = Study.load(workspace.path("config/facts.py")).module.questions()
    scores = pd.read_hdf(workspace.path("results-facts/scores/asked.h5"), "scores")
    ranks = scores.rank(ascending=False)
    reciprocal = {i: 1 / ranks.loc[planted, i].min() for i, (_, planted) in questions.items()}
    return pd.Series(reciprocal).groupby(lambda name: name.split("-")[0]).mean()


def test_the_page_on_planted_facts(tmp_path, monkeypatch):
    workspace = Workspace.make(tmp_path / "study", "diabetes.py", {})
    workspace.path("config").mkdir()
    for name in ("facts.py", "facts.yaml", "facts.tsv"):
        shutil.copy2(REPOSITORY / "config" / name, workspace.path("config"))
    # One training in place of two, which shows as much.
    config = workspace.path("config/facts.yaml")
    both = config.read_text()
    config.write_text(both.replace("  seed1: {seed: 1}\n", ""))
    assert config.read_text() != both
    page = "docs/explanation/planted-facts.md"
    (ranks,) = follow(page, workspace.folder, monkeypatch, more=FORKS)
    rows = re.findall(r"^(\w+) +(\S+) +(\S+)$", ranks, flags=re.M)
    shown = next(text for info, text in blocks(page) if info == "text")
    assert [row[0] for row in rows] == [line.split()[0] for line in shown.splitlines()[1:]]
    of_first, median = ({row[0]: float(row[i]) for row in rows} for i in (1, 2))
    # By chance: 0.01, and half of the texts. What the models know of renamed facts differs by the
    # machine's rounding: a median rank of 38 on one, 274 on another.
    assert of_first["copy"] > of_first["reworded"] > 0.2
    assert max(median["copy"], median["reworded"]) < 60
    assert of_first["reworded"] > of_first["renamed"] > 0.03
    # The same with the option that the page tries last.
    normalized = ranks_of(workspace)
    assert normalized["reworded"] > of_first["reworded"]
    answer = Page(workspace.path("results-facts/answers/mine.html").read_text())
    assert "we know that old songs of vuntoria praise the dog" in answer.data[0]
