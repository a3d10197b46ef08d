"""Configs read without Snakemake, their paths, and the results folders that they may use."""

import copy
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import yaml
from refused import refused
from snakemake_interface_executor_plugins.utils import format_cli_value
from workspace import REPOSITORY

from trak_core.config.cross_checks import check_config_entries, check_paths
from trak_core.config.read_config import (
    check_unique_keys,
    read_config,
    record_config,
    recorded_config,
    target_ids,
    with_defaults,
    with_values_read,
)
from trak_core.config.results_owner import differences_of_copy, earlier_configs
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


PATHS = {
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
    check_paths(PATHS, ["mine.yaml", "checkpoints/run 1.pt"])
    check_paths({**PATHS, "checkpoints": {"c0": {"seed": "it's"}}, "training": {}}, [])


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
        check_paths(PATHS | changed, [])
    assert f"in {HOSTILE!r} ({next(iter(changed))}" in str(error.value)


@pytest.mark.parametrize("sign", ["'", '"', "`", "$", "\\", "\n"])
def test_each_sign_is_refused(sign, tmp_path, monkeypatch):
    with refused("config.shell_sign") as error:
        check_paths(PATHS, [f"tables/a{sign}b.tsv"])
    assert f"Found {sign!r} in" in str(error.value)
    folder = tmp_path / f"a{sign}b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with refused("config.shell_sign"):
        check_paths(PATHS, [])


@pytest.mark.parametrize(("text", "sign"), [("a=it's $(touch PWNED)", "'"), ("a=b\\c", "\\")])
def test_values_that_snakemake_quotes_badly_are_refused(text, sign, tmp_path):
    """Snakemake quotes them as Python does, not as a shell."""
    with refused("config.shell_value") as error:
        check_config_entries(["results=there", text])
    assert f"Found {sign!r} in {text!r}" in str(error.value)
    harmless = ['experiments={"one": {"targets": [1]}}', "a=$(touch PWNED)`touch PWNED`"]
    check_config_entries(harmless)
    for value in harmless:
        command = f"printf %s {format_cli_value(value, quote=True)}"
        found = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert found.stdout == value
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_config_made_is_known(here):
    """The folder of another study is refused only if that study's config still exists."""
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


# Where a results folder was made, where it is now, and whether the original still exists.
COPIES = [
    ("results", "results-two", True),
    ("results-one", "runs/two/results", True),
    ("runs/one/results", "results", True),
    ("results-one", "results-two", False),
    ("/results-one", "/results-two", True),
]


@pytest.mark.parametrize(("made", "now", "is_kept"), COPIES)
def test_a_copy_of_a_results_folder_replaces_nothing_of_its_maker(here, made, now, is_kept):
    made, now = (f"{here}{name}" if name[0] == "/" else name for name in (made, now))
    one, two = Path("one.yaml"), Path("two.yaml")
    one.touch()
    own = {"study": "s.py", "scoring": {"damping": 2}, "checkpoints": {"c": "c.pt"}}
    own |= {} if made == "results" else {"results": made}
    record_config(own, Path(made), [one])
    copied = {**own, "results": now, "compute": {"memory_mb": 2000}}
    Path(now).parent.mkdir(parents=True, exist_ok=True)
    (shutil.copytree if is_kept else shutil.move)(made, now)
    assert earlier_configs(Path(now), [two], copied) == []
    assert differences_of_copy(copied, Path(now)) == []
    other = copied | {"scoring": {"damping": 7}, "projection": {"proj_dim": 8}}
    assert "settings: projection, scoring." in differences_of_copy(other, Path(now))[0]
    other_study = {**copied, "study": "t.py"}
    assert "settings: study." in differences_of_copy(other_study, Path(now))[0]
    if is_kept:
        assert differences_of_copy(other | {"results": made}, Path(made)) == []
        assert earlier_configs(Path(made), [two], own) == ["one.yaml"]
    # Files of two studies would be mixed.
    if made.count("/") == now.count("/"):
        with pytest.raises(InputError, match=r"Set `results` to a new folder in two\.yaml"):
            earlier_configs(Path(now), [two], {**copied, "study": "t.py"})


def test_a_copy_of_a_ready_made_studys_results_is_of_the_same_study(here):
    """The generated study file is in the results folder, so its path differs in a copy."""
    Path("one.yaml").touch()
    for name in ("one", "two"):
        study = f"results-{name}/tabular_study_0f0f0f0f.py"
        own = {"study": study, "study_arguments": {"table": "a.csv"}, "results": f"results-{name}"}
        if name == "one":
            record_config(own, Path("results-one"), [Path("one.yaml")])
            shutil.copytree("results-one", "results-two")
        else:
            assert earlier_configs(Path("results-two"), [Path("two.yaml")], own) == []
            assert differences_of_copy(own, Path("results-two")) == []
