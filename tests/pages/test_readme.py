"""The README is run: its own study, its config, its commands and the code that reads results."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from pages import follow
from workspace import REPOSITORY, Workspace, jobs

README = (REPOSITORY / "README.md").read_text()


def block(info):
    found = re.findall(rf"^```{re.escape(info)}\n(.*?)^```", README, flags=re.S | re.M)
    assert len(found) == 1, info
    return found[0]


def test_the_study_shown_is_the_one_that_is_tested():
    """But for how its data are loaded: the shorter start matters to tests alone."""
    tested = (REPOSITORY / "tests/studies/diabetes.py").read_text()
    start = "def make_model"
    assert block("python diabetes.py").split(start)[1] == tested.split(start)[1]


def test_a_study_is_about_thirty_lines():
    assert len(block("python diabetes.py").splitlines()) <= 30


def follow_own_models(folder):
    """The README's own-model section, as a user would follow it."""
    config = yaml.safe_load(block("yaml diabetes.yaml"))
    workspace = Workspace.make(folder, "diabetes.py", config)
    workspace.path("diabetes.py").write_text(block("python diabetes.py"))
    training = workspace.path("train_diabetes.py")
    training.write_text(block("python train_diabetes.py"))
    assert f"$ .venv/bin/python {training.name}\n" in README
    subprocess.run([sys.executable, training.name], cwd=folder, check=True, timeout=100)
    command = next(line for line in README.splitlines() if "--configfile diabetes.yaml" in line)
    arguments = shlex.split(command)[2:]
    assert arguments[:3] == ["--cores", "2", "--configfile"]
    status, output = workspace.snakemake("--cores", "2", text=block("yaml diabetes.yaml"))
    assert status == 0, output
    assert jobs(output)["draw_influences"] == 1
    assert jobs(output)["write_report"] == 1
    return workspace


@pytest.fixture(scope="module")
def diabetes(built_once):
    return built_once("diabetes", follow_own_models)


def test_the_own_study_gives_scores_and_a_figure(diabetes):
    results = diabetes.path("results-diabetes")
    scores = pd.read_hdf(results / "scores/two-patients.h5", "scores")
    assert scores.shape == (342, 2)
    assert scores.columns.tolist() == ["patient-342", "patient-400"]
    assert (results / "figures/two-patients.png").read_bytes().startswith(b"\x89PNG")
    assert "patient-342" in (results / "report.html").read_text()


def test_the_page_on_many_targets(diabetes, tmp_path, monkeypatch):
    study = diabetes.copy(tmp_path / "study")
    features = study.path("results-diabetes/features/run1/train.h5")
    before = features.stat().st_mtime_ns
    (printed,) = (
        text for text in follow("docs/many-targets.md", study.folder, monkeypatch) if text
    )
    assert len(printed.splitlines()) == 7  # five training samples, a line above and one below
    assert features.stat().st_mtime_ns == before
    assert study.path("results-diabetes/scores/two-patients.h5").exists()


def test_list_untracked_finds_what_a_removed_experiment_left(diabetes, tmp_path):
    study = diabetes.copy(tmp_path / "study")
    study.config["experiments"] = {"other": {"targets": ["patient-342"]}}
    _, output = study.snakemake("--list-untracked")
    assert "results-diabetes/scores/two-patients.h5" in output
    assert "results-diabetes/features/run1/two-patients.h5" in output


def test_deleting_the_scores_of_each_checkpoint_reruns_nothing(diabetes, tmp_path):
    study = diabetes.copy(tmp_path / "study")
    shutil.rmtree(study.path("results-diabetes/scores/two-patients"))
    assert study.would_run("all") == {}
    shutil.rmtree(study.path("results-diabetes/features"))
    assert study.would_run("all") == {}
    study.config["scoring"] = {"damping": 1}
    assert study.would_run()["compute_features"] == 6


def test_reading_the_results(tmp_path, monkeypatch):
    """The code block runs on files of the shape and names that the default study makes."""
    config = yaml.safe_load((REPOSITORY / "config/smoke.yaml").read_text())
    config["results"] = "results"
    config["study"] = str(REPOSITORY / "config/digits.py")
    config["checkpoints"] = {"seed0": {"seed": 0}}
    config["experiments"] = {"hard": {"targets": [1573, 1662, 678, 905]}}
    config["projection"]["proj_dim"] = 32
    del config["evaluation"]
    workspace = Workspace.make(tmp_path / "study", "small_digits.py", {**config})
    workspace.config["study"] = config["study"]
    workspace.run()
    monkeypatch.chdir(workspace.folder)
    code = re.search(r"^```python\n(import pandas.*?)^```", README, flags=re.S | re.M)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.group(1), {})
    shown = re.search(r"^```text\n( +1573.*?)^```", README, flags=re.S | re.M).group(1)
    headers = [line.split() for line in printed.getvalue().splitlines()]
    assert ["1573", "1662", "678"] in headers
    assert ["target_id", "rank", "sign", "train_id", "train_label", "score"] in headers
    assert ["id", "label", "prediction", "output", "output_sd"] in headers
    assert len(shown.splitlines()) == len(headers)


def test_every_key_of_the_config_is_described():
    schema = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())
    described = (REPOSITORY / "config/README.md").read_text()

    def properties(node):
        """Of a mapping, or of the alternative that is one."""
        either = [node, *node.get("anyOf", ())]
        return {k: v for part in either for k, v in part.get("properties", {}).items()}

    def keys(node, prefix=""):
        for key, value in properties(node).items():
            assert value.get("description"), key
            inner = list(keys(value, f"{prefix}{key}.")) if key != "experiments" else []
            yield from inner or [prefix + key]

    assert {"projection.kind", "compute.threads"} <= set(keys(schema))
    for key in keys(schema):
        assert f"`{key}`" in described, key
        default = schema
        for part in key.split("."):
            default = properties(default)[part]
        row = next(line for line in described.splitlines() if line.startswith(f"| `{key}`"))
        if "default" in default:
            assert str(default["default"]) in row, key


def test_links_lead_to_what_exists():
    pages = [REPOSITORY / "README.md", REPOSITORY / "config/README.md"]
    for page in [*pages, *sorted((REPOSITORY / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), (page, link)


def test_paths_in_the_readme_exist():
    for path in ("config/digits.py", "config/config.yaml", "config/smoke.yaml"):
        assert path in README
        assert Path(REPOSITORY, path).exists()
