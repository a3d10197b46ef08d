"""The page on language models is followed: its study, its command, its code."""

from pages import follow
from workspace import Workspace


def test_the_page_on_language_models(tmp_path, monkeypatch):
    workspace = Workspace.make(tmp_path / "study", "diabetes.py", {})
    (printed,) = follow("docs/language-models.md", workspace.folder, monkeypatch)
    explained, *influences = printed.splitlines()
    assert explained.startswith("explained: ")
    signs = [line[0] for line in influences]
    assert signs == ["+"] * 3 + ["-"] * 3
    log = workspace.path("results-manual/logs/train_checkpoint/seed0.log").read_text()
    assert "epoch 4: loss" in log
