"""The tutorial is followed: every file, command and piece of code, and what it prints."""

from pages import blocks, follow
from workspace import Workspace

PAGE = "docs/tutorial.md"


def test_the_tutorial(tmp_path, monkeypatch):
    study = Workspace.make(tmp_path / "study", "diabetes.py", {})
    printed = [text for text in follow(PAGE, study.folder, monkeypatch) if text]
    shown = [text for info, text in blocks(PAGE) if info == "text"]
    targets, influences, summary = zip(printed, shown, strict=True)
    assert targets[0] == targets[1]
    assert [len(text.splitlines()) for text in influences] == [5, 5]
    methods = [[line.split()[:2] for line in text.splitlines()] for text in summary]
    assert methods[0] == methods[1]
    # The first column of the scores' own row, and of the ceiling's.
    found = {line.split()[1]: float(line.split()[2]) for line in summary[0].splitlines()[1:]}
    assert found["random"] < found["scores"] < found["noise_ceiling"]
    for results in ("results-tumours", "results-trust"):
        report = study.path(f"{results}/report.html").read_text()
        assert "tumour-213" in report


def test_the_pages_on_clusters_and_gpus_name_what_there_is():
    for page in ("docs/slurm.md", "docs/gpu.md"):
        commands = [text for info, text in blocks(page) if info == "console"]
        assert commands
        for text in commands:
            assert text.startswith("$ .venv/bin/")
