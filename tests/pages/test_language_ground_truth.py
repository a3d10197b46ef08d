"""The page on planted facts is followed: its run finds them, and the models know them."""

import re
import shutil

from pages import blocks, follow
from workspace import REPOSITORY, Workspace


def test_the_page_on_planted_facts(tmp_path, monkeypatch):
    workspace = Workspace.make(tmp_path / "study", "diabetes.py", {})
    workspace.path("config").mkdir()
    for name in ("facts.py", "facts.yaml", "facts.tsv"):
        shutil.copy2(REPOSITORY / "config" / name, workspace.path("config"))
    page = "docs/language-ground-truth.md"
    ranks, texts = follow(page, workspace.folder, monkeypatch)
    found = re.findall(r"^(\w+) +(\S+) +(\S+)$", ranks, flags=re.M)
    shown = next(text for info, text in blocks(page) if info == "text")
    assert [row[0] for row in found] == [line.split()[0] for line in shown.splitlines()[1:]]
    of_first, median = ({row[0]: float(row[i]) for row in found} for i in (1, 2))
    # By chance: 0.01, and half of the texts.
    assert of_first["copy"] > of_first["reworded"] > 0.2
    assert max(median.values()) < 60
    question, *answers = texts.splitlines()
    assert question.startswith("asked: ")
    assert any(line.endswith("(planted)") for line in answers)
