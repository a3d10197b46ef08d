"""A config read without Snakemake is the one that its starts have."""

import copy
import shutil
import warnings
from pathlib import Path

import pytest
import yaml
from refused import refused
from workspace import REPOSITORY

from trak_core.config.read_config import (
    earlier_configs,
    read_config,
    record_config,
    recorded_config,
    with_defaults,
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


def test_a_folder_that_another_config_made_is_known(tmp_path, monkeypatch):
    """A run is refused a folder of another study whose config is still there."""
    monkeypatch.chdir(tmp_path)
    results, one, two = (Path(name) for name in ("results", "one.yaml", "two.yaml"))
    own = {"study": "results/tabular_study_0f0f0f0f.py", "study_arguments": {"table": "a.csv"}}
    later = {**own, "study": "results/tabular_study_12345678.py"}  # by another version
    assert earlier_configs(results, [one], own) == []
    record_config(own, results, [one, Path("more.yaml")])
    assert earlier_configs(results, [one.absolute()], own) == []
    assert earlier_configs(results, [], own) == []  # the default study's
    assert earlier_configs(results, [two], later) == ["one.yaml", "more.yaml"]
    others = [{"study": "s.py"}, {**own, "study_arguments": {"table": "b.csv"}}]
    for other in others:
        assert earlier_configs(results, [two], other) == ["one.yaml", "more.yaml"]
    one.touch()
    for other in others:
        with refused("config.results_of_another", "two.yaml", "one.yaml", "tabular"):
            earlier_configs(results, [two], other)
        assert earlier_configs(results, [one], other) == []
    assert earlier_configs(results, [two], later) == ["one.yaml", "more.yaml"]


# Where a results folder was made, where it lies now, and whether the first is there still.
COPIES = {
    "beside": ("results-one", "results-two", True),
    "the default's": ("results", "results-two", True),
    "deeper": ("results-one", "runs/two/results", True),
    "less deep": ("runs/one/results", "results", True),
    "renamed": ("results-one", "results-two", False),
    "absolute": ("/results-one", "/results-two", True),
}


@pytest.mark.parametrize(("made", "now", "is_kept"), COPIES.values(), ids=COPIES)
def test_a_copy_of_a_results_folder_replaces_nothing_of_its_maker(
    tmp_path, monkeypatch, made, now, is_kept
):
    monkeypatch.chdir(tmp_path)
    made, now = (f"{tmp_path}{name}" if name[0] == "/" else name for name in (made, now))
    one, two = Path("one.yaml"), Path("two.yaml")
    one.touch()
    own = {"study": "s.py", **({} if made == "results" else {"results": made})}
    record_config(own, Path(made), [one])
    copied = {**own, "results": now}
    Path(now).parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if is_kept else shutil.move)(made, now)
    assert earlier_configs(Path(now), [two], copied) == []
    if is_kept:
        assert earlier_configs(Path(made), [two], own) == ["one.yaml"]
    # Another study's files would lie among this one's; the folder has a name of its own already.
    if made.count("/") == now.count("/"):
        with pytest.raises(InputError, match=r"Name a new folder as `results` in two\.yaml"):
            earlier_configs(Path(now), [two], {**copied, "study": "t.py"})


def test_a_copy_of_a_whole_project_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("one.yaml").touch()
    record_config({"study": "s.py", "results": "results"}, Path("results"), [Path("one.yaml")])
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    again = {"study": "s.py", "results": "results"}
    assert earlier_configs(Path("results"), [Path("two.yaml")], again) == ["one.yaml"]


def test_what_is_no_config_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("- study.py\n")
    with refused("config.no_mapping", "mine.yaml", "list"):
        read_config(path, SCHEMA)
    path.write_text("study: mine.py\nstdy: mine.py\n")
    with pytest.raises(InputError, match="unknown key 'stdy'"):
        read_config(path, SCHEMA)
