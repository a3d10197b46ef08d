"""A config read without Snakemake is the one that its starts have."""

import copy
import warnings
from pathlib import Path

import pytest
import yaml
from refused import refused
from workspace import REPOSITORY

from trak_core.config.read_config import (
    check_unique_keys,
    read_config,
    record_config,
    recorded_config,
    target_ids,
    with_defaults,
    with_values_read,
)
from trak_core.errors import InputError

SCHEMA = REPOSITORY / "workflow/schemas/config.schema.yaml"
CONFIGS = [*sorted((REPOSITORY / "config").glob("*.yaml"))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_defaults_are_those_that_snakemake_fills_in(path):
    from snakemake.utils import validate

    given = yaml.safe_load(path.read_text())
    expected = copy.deepcopy(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        validate(expected, schema=str(SCHEMA))
    schema = yaml.safe_load(SCHEMA.read_text())
    before = copy.deepcopy((given, schema))
    filled = with_defaults(given, schema)
    assert filled == expected != given
    # No value of the schema is shared with the config, which may be changed.
    filled["compute"]["memory_mb"] = 0
    assert (given, schema) == before


def test_what_a_start_left_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "mine/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine")
    results = tmp_path / "mine/results"
    record_config({"study": "s.py"}, results.relative_to(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").rename(tmp_path / "moved")
    results = tmp_path / "moved/results"
    assert recorded_config(results) == ({"study": "s.py"}, tmp_path / "moved")
    path = results / "config.json"
    path.write_text(path.read_text().replace("s.py", "t.py"))
    with refused("config.no_record"):
        recorded_config(results)


def test_what_a_start_was_given_beside_its_config_counts(tmp_path, monkeypatch):
    """For this file alone, today's, and as long as no other start has come."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    path, other = Path("mine.yaml"), Path("other.yaml")
    text = "study: s.py\nscoring: {damping: 2, top: 3}\nexperiments: {a: {targets: [1]}}\n"
    for file in (path, other):
        file.write_text(f"{text}model_output: regression\ncheckpoints: {{c: c.pt}}\n")
    entries = ["scoring={damping: 5}", "experiments={b: {targets: ['1']}}"]
    given = {"scoring": {"damping": "5"}, "experiments": {"b": {"targets": ["1"]}}}
    record_config({}, Path("results"), [path.absolute()], given, entries)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    config = read_config(path, SCHEMA)
    assert (config["scoring"]["damping"], config["scoring"]["top"]) == (5, 3)
    targets = {name: one["targets"] for name, one in config["experiments"].items()}
    assert targets == {"a": [1], "b": ["1"]}
    path.write_text(path.read_text().replace("top: 3", "top: 4"))
    assert read_config(path, SCHEMA)["scoring"]["top"] == 4
    assert read_config(other, SCHEMA)["scoring"]["damping"] == 2
    record_config({}, Path("results"), [path])
    assert read_config(path, SCHEMA)["scoring"]["damping"] == 2


def test_what_is_no_config_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("- study.py\n")
    with refused("config.no_mapping", "mine.yaml", "list"):
        read_config(path, SCHEMA)
    path.write_text("study: mine.py\nstdy: mine.py\n")
    with pytest.raises(InputError, match="unknown key 'stdy'"):
        read_config(path, SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "{a: {b: 1e-3, c: 1.5, d: null, e: true, f: ''}}",
        "{mine: {targets: [1506, '1506', patient-1]}}",
        "[1, '2', {a: '007'}]",
        "{a: 'b: c', d: \"[1]\"}",
    ],
)
def test_values_within_config_arguments_are_read_as_in_a_file(text):
    """Snakemake passes those of ``--config key={...}`` as text."""
    as_text = yaml.load(text, Loader=yaml.BaseLoader)
    config = with_values_read({"key": as_text, "other": "5"}, [f"key={text}", "other=5"])
    assert config == {"key": yaml.safe_load(text), "other": "5"}


def test_other_values_of_the_file_are_kept():
    config = {"projection": {"kind": "normal", "proj_dim": "64"}, "checkpoints": {"1": "01"}}
    merged = with_values_read(config, ["projection={proj_dim: 64}", "checkpoints={1: '01'}"])
    assert merged == {"projection": {"kind": "normal", "proj_dim": 64}, "checkpoints": {"1": "01"}}


def test_a_value_that_is_not_yaml_is_refused():
    config = {"training": {"until": "2024-13-45"}}
    with refused("config.no_yaml", "--config training: the value must be YAML"):
        with_values_read(config, ["training={until: 2024-13-45}"])
    with refused("config.octal", "--config training: a number must be decimal", "010", 8):
        with_values_read(config, ["training={epochs: 010}"])


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (["12", "-3", "0"], [12, -3, 0]),
        (["0007", "12"], ["0007", "12"]),
        (["12", "twelve"], ["12", "twelve"]),
        (["-0"], ["-0"]),
        (["+1"], ["+1"]),
    ],
)
def test_ids_of_a_table_are_integers_if_all_are_written_as_one_is(tmp_path, written, ids):
    table = tmp_path / "targets.tsv"
    table.write_text("id\n" + "\n".join(written) + "\n")
    assert target_ids(str(table)) == ids


def test_merge_keys_are_refused(tmp_path):
    """They are not reported as a key that is given twice."""
    config = tmp_path / "merged.yaml"
    config.write_text("first: &first {targets: [0]}\nsecond: {<<: *first, targets: [1]}\n")
    with refused("config.no_yaml", "merge", config):
        check_unique_keys(config)
