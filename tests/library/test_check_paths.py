"""Paths on a job's command line hold nothing that a shell would run."""

import subprocess

import pytest
from refused import refused
from snakemake_interface_executor_plugins.utils import format_cli_value

from trak_core.config.cross_checks import check_given, check_paths

CONFIG = {
    "study": "study.py",
    "checkpoints": {"c0": "a b (1)/c0.pt", "c1": {"path": "c1.pt", "run": "c0", "at": 3}},
    "experiments": {"one": {"targets": [1]}, "two": {"targets": "t.tsv", "data": "asked.jsonl"}},
    "data_files": ["data/**/*.csv", "R&D; notes.txt"],
    "evaluation": {"ground_truth": "truth.h5"},
    "compute": {"conda": "env.yaml"},
}
# On an executor of clusters, a shell would run the command within.
HOSTILE = "it's $(touch PWNED).pt"


def test_spaces_parentheses_and_patterns_are_paths():
    check_paths(CONFIG, ["mine.yaml", "checkpoints/run 1.pt"])
    check_paths({**CONFIG, "checkpoints": {"c0": {"seed": "it's"}}, "training": {}}, [])


@pytest.mark.parametrize(
    "changed",
    [
        *({key: HOSTILE} for key in ("study", "checkpoints")),
        *({"experiments": {"one": {key: HOSTILE}}} for key in ("targets", "data")),
        {"data_files": ["a", HOSTILE]},
        {"evaluation": {"ground_truth": HOSTILE}},
        {"compute": {"conda": HOSTILE}},
    ],
)
def test_every_path_of_a_config_is_looked_at(changed):
    with refused("config.shell_sign") as error:
        check_paths(CONFIG | changed, [])
    assert f"in {HOSTILE!r} ({next(iter(changed))}" in str(error.value)


@pytest.mark.parametrize("sign", ["'", '"', "`", "$", "\\", "\n"])
def test_each_sign_is_refused(sign, tmp_path, monkeypatch):
    with refused("config.shell_sign") as error:
        check_paths(CONFIG, [f"tables/a{sign}b.tsv"])
    assert f"Found {sign!r} in" in str(error.value)
    folder = tmp_path / f"a{sign}b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with refused("config.shell_sign"):
        check_paths(CONFIG, [])


@pytest.mark.parametrize(("text", "sign"), [("a=it's $(touch PWNED)", "'"), ("a=b\\c", "\\")])
def test_values_that_snakemake_quotes_badly_are_refused(text, sign, tmp_path):
    """Snakemake quotes them as Python does, not as a shell."""
    with refused("config.shell_value") as error:
        check_given(["results=there", text])
    assert f"Found {sign!r} in {text!r}" in str(error.value)
    harmless = ['experiments={"one": {"targets": [1]}}', "a=$(touch PWNED)`touch PWNED`"]
    check_given(harmless)
    for value in harmless:
        command = f"printf %s {format_cli_value(value, quote=True)}"
        found = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert found.stdout == value
    assert not list(tmp_path.iterdir())
