"""The README is run: its own study, its config, its commands and the code that reads results."""

import re

import pandas as pd
import pytest
import yaml
from pages import blocks, follow, run_code
from workspace import REPOSITORY, Workspace

PAGES = [REPOSITORY / "README.md", REPOSITORY / "config/README.md"]
OWN_PAGE = "docs/how-to/own-model.md"
OWN = dict(blocks(OWN_PAGE))


def test_the_study_shown_is_the_one_that_is_tested():
    """All but how its data are loaded: the shorter start matters to tests alone."""
    study = OWN["python diabetes.py"]
    tested = (REPOSITORY / "tests/studies/diabetes.py").read_text()
    start = "def make_model"
    assert study.split(start)[1] == tested.split(start)[1]


def test_the_example_in_python_runs():
    ((info, code),) = blocks("README.md", "In Python")
    assert info == "python"
    lines = run_code(code).splitlines()
    assert lines[0].split() == ["target", "rank", "train", "score"]


def test_the_page_in_python(here):
    code = [text for kind, text in blocks("docs/how-to/python.md") if kind == "python"]
    printed = run_code("".join(code))
    assert printed.startswith("(180, 20)")
    assert (here / "features/features/seed1/train.h5").exists()


def follow_own_model(folder):
    folder.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        follow(OWN_PAGE, folder, monkeypatch)
    return Workspace(folder, yaml.safe_load(OWN["yaml diabetes.yaml"]))


@pytest.fixture(scope="module")
def diabetes(built_once):
    return built_once("diabetes", follow_own_model)


def test_the_own_study_gives_scores_and_pages(diabetes):
    results = diabetes.path("results-diabetes")
    scores = pd.read_hdf(results / "scores/two-patients.h5", "scores")
    assert scores.shape == (342, 2)
    assert scores.columns.tolist() == ["patient-342", "patient-400"]
    assert "patient-342" in (results / "answers/two-patients.html").read_text()
    assert "patient-342" in (results / "report.html").read_text()


def test_the_page_on_many_targets(diabetes, tmp_path, monkeypatch):
    study = diabetes.copy(tmp_path / "study")
    features = study.path("results-diabetes/features/run1/train.h5")
    before = features.stat().st_mtime_ns
    difference, counts = follow("docs/how-to/many-targets.md", study.folder, monkeypatch)
    # Five training samples each. Pandas adds a line below, and one above if the index has a name.
    assert len(difference.splitlines()) == 6
    assert len(counts.splitlines()) == 7
    assert features.stat().st_mtime_ns == before
    assert study.path("results-diabetes/scores/two-patients.h5").exists()


def test_reading_the_results(here):
    """The code block runs on files of the shape and names that the default study makes."""
    config = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    del config["evaluation"]
    config |= {
        "results": "results",
        "study": str(REPOSITORY / "config/digits.py"),
        "training": {"epochs": 1},
        "checkpoints": {"seed0": {"seed": 0}},
        "experiments": {"hard": {"targets": [1573, 1662, 678, 905]}},
        "projection": {"proj_dim": 32},
    }
    Workspace(here, config).run()
    (_, code), (_, shown), *_ = blocks("docs/how-to/read-results.md", "Scores with pandas")
    lines = [line.split() for line in run_code(code).splitlines()]
    assert ["1573", "1662", "678"] in lines
    assert ["target_id", "rank", "sign", "train_id", "train_label", "score"] in lines
    assert ["id", "label", "prediction", "output", "output_sd", "improves"] in lines
    assert len(shown.splitlines()) == len(lines)
    ((_, code),) = blocks("docs/how-to/read-results.md", "In a notebook")
    looked = run_code(code)
    assert looked.startswith("Results in results: hard\n")
    assert ["target", "rank", "train", "score"] in [line.split() for line in looked.splitlines()]
    assert ["target", "score"] in [line.split() for line in looked.splitlines()]


def test_links_lead_to_what_exists():
    for page in [*PAGES, *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), (page, link)
