"""The tutorial is followed: every file, command and piece of code, and what it prints."""

import os
import subprocess
import sys

import pytest
import yaml
from pages import blocks, commands, follow
from refusals import check, save_weights
from workspace import REPOSITORY, Workspace, snakemake

FIRST, TRUST = "docs/tutorial/first-study.md", "docs/tutorial/trust.md"
LISTS = "docs/how-to/lists.md"


def test_the_tutorial(tmp_path, monkeypatch):
    study = Workspace.make(tmp_path / "study", "diabetes.py", {})
    pages = (FIRST, TRUST)
    # Nobody looks at the numbers of the second evaluation: fewer trainings. Two runs of five.
    runs = {r"  run[234]: .*\n": ""}
    along = {r"(results=results-along)": r"\1 'evaluation={subsets: {count: 6}}'"}
    followed = [
        follow(page, study.folder, monkeypatch, runs | more)
        for page, more in zip(pages, ({}, along), strict=True)
    ]
    printed = [text for texts in followed for text in texts]
    shown = [text for page in pages for info, text in blocks(page) if info == "text"]
    targets, influences, summary, along = zip(printed, shown, strict=True)
    assert targets[0] == targets[1]
    assert [len(text.splitlines()) for text in influences] == [5, 5]
    for table in (summary, along):
        ours, theirs = ([line.split()[:2] for line in text.splitlines()] for text in table)
        assert ours == theirs
    lds = {line.split()[1]: float(line.split()[2]) for line in summary[0].splitlines()[1:]}
    assert lds["random"] < lds["scores"] < lds["noise_ceiling"]
    for results in ("results-tumours", "results-trust", "results-along"):
        assert "tumour-213" in study.path(f"{results}/report.html").read_text()
    (suspects,) = follow(LISTS, study.folder, monkeypatch)
    assert len(suspects.splitlines()) == 4  # three samples below a header
    check_lists(study)


def check_lists(study):
    """The page's configs are valid, each for a study that has what the page says it needs."""
    lists, removals, pool = (yaml.safe_load(text) for info, text in blocks(LISTS) if info == "yaml")
    save_weights(study.path("c0.pt"))
    experiments = {name: {"targets": "all"} for name in ("held-out", "test")}
    check(study, {**lists, "experiments": experiments})
    trains = yaml.safe_load(dict(blocks(TRUST))["yaml trust.yaml"])
    check(study, {**trains, **removals, "experiments": experiments, "results": "results-removals"})
    source = study.path("diabetes.py")
    source.write_text(f"{source.read_text()}\n\ndef encode(row):\n    return x[row], y[row]\n")
    study.path(pool["lists"]["select"]["pool"]).write_text('{"row": 3}\n{"row": 5}\n')
    check(study, {**pool, "experiments": experiments, "results": "results-pool"})


def test_the_page_on_clusters_plans_a_study(tmp_path):
    study = Workspace.make(tmp_path / "study", "diabetes.py", {})
    study.take_code()  # the profiles, where the page names them
    files = dict(blocks(FIRST) + blocks(TRUST))
    study.path("tumours.py").write_text(files["python tumours.py"])
    study.path("mine.yaml").write_text(files["yaml trust.yaml"])
    for program, *arguments in commands("docs/how-to/slurm.md"):
        assert program == ".venv/bin/snakemake"
        status, planned = snakemake(study.folder, *arguments, "--dry-run")
        assert status == 0, planned
        assert "compute_features" in planned


@pytest.mark.skipif("TRAK_CORE_GATE" not in os.environ, reason="needs a network: the gate's")
def test_what_the_page_on_gpus_installs_can_be_had():
    for program, *arguments in commands("docs/how-to/gpu.md"):
        assert program == ".venv/bin/python"
        planned = subprocess.run(
            [sys.executable, *arguments, "--dry-run"],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert planned.returncode == 0, planned.stderr
        assert "numba-cuda" in planned.stdout
