"""Bad configs and tables of checkpoints are refused before any job, with one message."""

import datetime
import re

import pytest
import yaml
from refusals import as_text, check, message, refuse
from refused import refused
from workspace import Workspace


def at(path, value):
    """Return a change of the good config, from the key's path."""
    *above, key = path.split(".")
    change = {key: value}
    for name in reversed(above):
        change = {name: change}
    return change


def experiment(name):
    return {"experiments": {name: {"targets": ["patient-342"]}}}


# A key, its value, and the expected requirement in the message.
VALUES = {
    "wrong type": ("projection.proj_dim", "many", "an integer"),
    "NaN": ("scoring.damping", float("nan"), "a finite number"),
    "unknown model output": ("model_output", "other", re.compile(r"one of image_.*, loss(?=\.)")),
    "an experiment without targets": (
        *("experiments.mine", {}),
        "a mapping with targets or data or where",
    ),
    **{
        f"the results folder {name!r}": ("results", name, "described under Meaning")
        for name in ("$(touch ran)", "results\n", "my study", "r\u00e9sultats")
    },
}
DATE = datetime.date(2024, 1, 1)
POOLED = {"lists": {"select": {"pool": "diabetes.py"}}}
ADAM, EXACT = {"preconditioner": "adam"}, {"projection": "exact"}
HADAMARD = {"kind": "hadamard", "proj_dim": 48}
TRAINED = {"training": {}, "checkpoints": {"c0": {}}}


def removals(**lists):
    """Return a config that trains, with removals by lists."""
    return TRAINED | {"evaluation": {"removals": lists}}


GIVEN_TWICE = as_text({}).replace(b"  c0: c0.pt\n", b"  c0: c0.pt\n  c1: c0.pt\n  c0: other.pt\n")
# Changes of the good config and the values that the message must contain, by error code.
REFUSALS = {
    "config.schema": {
        **{
            name: (at(path, value), path, must, f"Found {value!r}")
            for name, (path, value, must) in VALUES.items()
        },
        "an experiment's name with a path": (experiment("../mine"), "experiments", "'../mine'"),
        "an experiment's name that ends a line": (experiment("a\n"), "experiments", r"'a\n'"),
        "a target that is no id": (
            at("experiments.mine.targets", [3.5]),
            *("experiments.mine.targets.0", "an integer or text", 3.5),
        ),
        "a sweep without retrained models": (
            at("evaluation.sweep", {}),
            *("evaluation", "a mapping with subsets or ground_truth"),
        ),
        "experiments without retrained models": (
            at("evaluation.experiments", ["mine"]),
            *("evaluation", "a mapping with subsets or ground_truth"),
        ),
        "two at once": (
            {"projection": {"seed": -1}, "model_output": "x"},
            *("projection.seed", "-1", "'x'"),
        ),
    },
    "config.key_twice": {"a key twice": (GIVEN_TWICE, "'c0'", "4 and 6")},
    "config.octal": {
        name: (as_text({}) + f"data_files: [{value}]\n".encode(), value, number)
        for name, value, number in (("base 8", "0123", 83), ("base 60", "12:30", 750))
    },
    "config.text_name": {"a name that is a number": (experiment(2024), "experiments", 2024)},
    "config.plain_value": {"a date": (at("training.start", DATE), "training.start", repr(DATE))},
    "spec.power_of_two": {
        "a proj_dim of another kind": (at("projection", HADAMARD), "hadamard", 48)
    },
    "config.memory": {
        "too little memory": (
            {"projection": {"proj_dim": 4096}, "compute": {"memory_mb": 200}},
            *(4096, re.compile(r"\d+(?= MiB)"), 200),
        )
    },
    "config.preconditioner": {
        "second moments without a projection": (ADAM | EXACT, "adam", "`projection: exact`")
    },
    "config.label_draws": {
        "drawn labels of an unknown loss": (
            {"label_draws": 2, "model_output": "loss"},
            *("regression", "Found loss"),
        ),
        "drawn labels weighted by curvature": (
            {"label_draws": 2} | at("scoring.weighting", "curvature"),
            "scoring.weighting",
        ),
    },
    "config.list_experiment": {
        "a list of one of several experiments": (
            {"experiments": {"a": {"targets": [1]}, "b": {"targets": [2]}}, "lists": ["drop"]},
            *("a, b", "none"),
        )
    },
    "config.list_features": {
        "copies without features": (EXACT | {"lists": ["duplicates"]}, "duplicates"),
        "a pool without features": (EXACT | POOLED, "select with a pool"),
    },
    "config.removals_of_no_list": {
        "removals by no list": (removals(drop={}) | {"lists": ["suspects"]}, "drop", "suspects")
    },
    "config.unknown_experiment": {
        "removals for targets that are not there": (
            removals(drop={"experiment": "b"}) | {"lists": ["drop"]},
            "Found 'b'",
        )
    },
    "config.removals_of_pool": {"removals by a pool": (removals(select={}) | POOLED, "select")},
    "config.pool_name": {
        "an experiment called as the pool": (POOLED | experiment("pool"), "Found pool")
    },
    "config.removals_fractions": {
        "removals of more than is listed": (
            removals(select={"fractions": [0.1]}) | {"lists": ["select"]},
            *("0.05", "Found 0.1"),
        )
    },
    "config.where_alone": {
        "a description beside ids": (
            {"experiments": {"mine": {"targets": ["patient-342"], "where": "label > 3"}}},
            *("mine", "Found targets"),
        )
    },
    "config.list_output": {
        f"{name} of an output that says nothing": (
            {"model_output": "study.py:f", "lists": [name]},
            "larger_is_better: true",
        )
        for name in ("suspects", "drop", "select")
    },
    "config.exact": {
        "exact top influences": (EXACT | at("scoring.keep", "top_k"), "scoring.keep", "top_k"),
        "exact scores in shards": (EXACT | {"compute": {"shards": 2}}, 2, "compute.shards"),
        "exact float16": (EXACT | {"features_dtype": "float16"}, "features_dtype float16"),
    },
    "config.missing_checkpoint": {
        "no checkpoint": ({"checkpoints": {"c0": "gone.pt", "c1": "lost"}}, "gone.pt, lost")
    },
    "config.missing_table": {"no table": ({"checkpoints": "gone.tsv"}, "gone.tsv")},
    "config.missing_question": {
        "no question": (at("experiments.mine.data", "gone.tsv"), "gone.tsv")
    },
    "config.missing_output": {
        "no file of a model output": ({"model_output": "gone.py:f"}, "gone.py")
    },
    "config.missing_data_file": {"no data file": ({"data_files": ["a/*.csv"]}, "'a/*.csv'")},
    "config.missing_ground_truth": {
        "no models retrained elsewhere": (at("evaluation.ground_truth", "gone.h5"), "gone.h5")
    },
    "config.checkpoint_value": {
        "path with training": ({"training": {}}, "'c0.pt'", "'c0'", "with `training`")
    },
    "config.preflight": {
        "parameter pattern": ({"parameters": ["head.*"]}, "'head.*'", "0.weight, 0.bias"),
        "targets of a column that nobody brings": (
            {"experiments": {"mine": {"where": "speaker == 3"}}},
            "speaker",
        ),
        "groups of a column that nobody brings": ({"groups": ["annotater"]}, "annotater"),
    },
    "compute.shards": {
        "too many shards": ({"compute": {"shards": 1000}}, "training samples", 1000, 342)
    },
    "config.results_folder": {"a results folder that is a file": ({"results": "c0.pt"}, "c0.pt")},
}
CONFIGS = {
    name: (change, code, *values)
    for code, cases in REFUSALS.items()
    for name, (change, *values) in cases.items()
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config(workspace, name):
    change, code, *values = CONFIGS[name]
    with refused(code, *values):
        check(workspace, change)


HEADER = b"checkpoint\tpath\n"
# Contents of a table of checkpoints, and what the message must name, by error code.
TABLES = {
    "config.table": {
        "without rows": (HEADER, "only a header"),
        "with commas": (
            b"checkpoint,path\nc0,c0.pt\n",
            *("tab-separated", "Missing: checkpoint, path", "Found checkpoint,path"),
        ),
        "not UTF-8": (HEADER + b"c0\tcaf\xe9.pt\n", "tab-separated", "'utf-8' codec"),
        "a quote without an end": (HEADER + b'c0\t"c0.pt\nc1\tc0.pt\n', "unexpected end"),
        "a row without a path": (HEADER + b"c0\n", "Found 'c0', '' in line 2"),
        "more cells than the header": (
            HEADER + b"c0\tc0.pt\t\nc1\tc1.pt\trun1\n",
            *("which has 2", "Found 3 cells in line 3"),
        ),
    },
    "config.checkpoint_id": {
        "an id twice": (HEADER + b"c0\tc0.pt\nc0\tother.pt\n", "Found 'c0' twice"),
        "an id with a path": (HEADER + b"../../c0\tc0.pt\n", "a file name", "'../../c0'"),
    },
    "config.missing_checkpoint": {
        "a path to nothing": (HEADER + b"c0\t(touch ran)\n", "(touch ran)")
    },
}


@pytest.mark.parametrize(
    ("code", "name"), [(code, name) for code, tables in TABLES.items() for name in tables]
)
def test_bad_table(workspace, code, name):
    content, *values = TABLES[code][name]
    workspace.path("table.tsv").write_bytes(content)
    with refused(code, *values):
        check(workspace, {"checkpoints": "table.tsv"})


def test_ids_that_differ_in_type_alone(workspace):
    with refused("config.checkpoint_id", "Found '1' twice"):
        check(workspace, {"checkpoints": {1: "c0.pt", "1": "c0.pt"}})


# One refusal by the schema, one by Python code, and one by the preflight.
TEXTS = {
    "a key that the schema does not know": (
        {"projecton": {}},
        r"^The config is not valid: the config: unknown key 'projecton'\. Did you mean proj",
    ),
    "a checkpoint's id with a command": (
        {"checkpoints": {"$(touch ran)": "c0.pt"}},
        r"^A checkpoint's id becomes a file name.*Found '\$\(touch ran\)'",
    ),
    "unknown target": (
        at("experiments.mine.targets", ["patient-1"]),
        r"experiment mine: Targets must be ids .* Found patient-1\. The data contain 100 samples",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_snakemake_says_what_is_bad_about_a_config(workspace, name):
    config, expected = TEXTS[name]
    assert re.search(expected, message(refuse(workspace, config)))
    assert not list(workspace.folder.rglob("ran"))


def test_training_arguments_that_train_does_not_take(tmp_path):
    config = {
        "model_output": "image_classification",
        "training": {"epoch": 5},
        "checkpoints": {"c0": {"seed": 0}},
        "experiments": {"mine": {"targets": [1506]}},
    }
    workspace = Workspace.make(tmp_path / "study", "small_digits.py", config)
    signature, arguments = re.compile(r"(?<=train)\(.*?\)"), "{'epoch': 5, 'seed': 0}"
    with refused("config.preflight", signature, arguments, "c0", "'steps'"):
        check(workspace, yaml.safe_dump(workspace.config).encode())


def test_lists_of_an_output_that_says_what_is_better(workspace):
    study = workspace.path("diabetes.py")
    study.write_text(f"{study.read_text()}\n\ndef f(x, y):\n    return -(x[0] - y) ** 2\n")
    own = {"function": "diabetes.py:f", "larger_is_better": True}
    check(workspace, {"model_output": own, "lists": ["suspects"]})


def test_a_good_config_alone_decides_what_runs(workspace):
    """No value of config/config.yaml is merged into it. The results folder is normalized."""
    _, output = workspace.snakemake("-n", text=as_text({"results": "./out/"}))
    assert "out/scores/mine.h5" in output
    assert "./out" not in output
    assert "mix" not in output
