"""Bad configs stop before any job; one message says what must hold, what was found, what to do."""

import datetime
import re

import pytest
import yaml
from refusals import GOOD, STUDY, message, refuse
from workspace import Workspace

CONFIGS = {
    "unknown key": (
        {"projecton": {}},
        r"the config: unknown key 'projecton'\. Did you mean projection\? Known keys: study, data",
    ),
    "a key that is misspelt": (
        {"scoring": {"normalise": True}},
        r"scoring: unknown key 'normalise'\. Did you mean normalize\? Known keys: damping",
    ),
    "unknown key inside": (
        {"projection": {"dim": 3}},
        r"projection: unknown key 'dim'\. Known keys: kind, proj_dim, seed",
    ),
    "wrong type": (
        {"projection": {"proj_dim": "many"}},
        r"projection\.proj_dim: must be an integer\. Found 'many'\. Meaning: k",
    ),
    "a number that is not an integer": (
        {"projection": {"proj_dim": 16.0}},
        r"projection\.proj_dim: must be an integer\. Found 16\.0",
    ),
    "a name that is a number": (
        {"experiments": {2024: {"targets": ["patient-342"]}}},
        r"experiments: a name must be text\. Found 2024: put it in quotes",
    ),
    "a name like a file's": (
        {"experiments": {"mine.h5": {"targets": ["patient-342"]}}},
        r"experiments: must be as its meaning says\. Found 'mine\.h5'\. Meaning: A name",
    ),
    "a kind that does not take this proj_dim": (
        {"projection": {"kind": "hadamard", "proj_dim": 48}},
        r"proj_dim must be a power of two for the projection kind hadamard\. Found 48",
    ),
    "too little memory": (
        {"projection": {"proj_dim": 4096}, "compute": {"memory_mb": 200}},
        r"compute\.memory_mb must hold the normal matrix of proj_dim 4096: \d+ MiB\. Found 200",
    ),
    "a projection by its name alone": (
        {"projection": "rademacher"},
        r"projection: must be exact or a mapping\. Found 'rademacher'\. Meaning: .*by its keys",
    ),
    "a projection of another type": (
        {"projection": 512},
        r"projection: must be exact or a mapping\. Found 512\. Meaning: .* or `exact`",
    ),
    "exact scores that memory does not hold": (
        {"projection": "exact", "compute": {"memory_mb": 64}, "study": "many.py"},
        r"experiment mine: compute\.memory_mb must hold exact scores of 3420 training samples, "
        r"three times 3420 x 3420 numbers, and 1 targets: 268 MiB\. Found 64\. Raise it, take a "
        r"projection in place of `projection: exact`",
    ),
    "second moments of what is trained here": (
        {"preconditioner": "adam", "training": {}, "checkpoints": {"c0": {}}},
        r"With `preconditioner: adam`, checkpoints must bring .* Found `training`\. Leave either",
    ),
    "second moments without a projection": (
        {"preconditioner": "adam", "projection": "exact"},
        r"With `preconditioner: adam`, gradients must be projected\. Found `projection: exact`",
    ),
    "the distortion of divided gradients": (
        {"preconditioner": "adam", "distortion": {}},
        r"With `preconditioner: adam`, what a projection keeps .* Found `distortion`\. Leave",
    ),
    "exact scores of top influences alone": (
        {"projection": "exact", "scoring": {"keep": "top_k"}},
        r"With `projection: exact`, scoring\.keep must be full: .* Found top_k",
    ),
    "exact scores in shards": (
        {"projection": "exact", "compute": {"shards": 2}},
        r"With `projection: exact`, shards must be 1: .* Found 2 in compute\.shards",
    ),
    "exact scores of targets in shards": (
        {"projection": "exact", "experiments": {"mine": {"targets": ["patient-342"], "shards": 3}}},
        r"With `projection: exact`, shards must be 1: .* Found 3 in experiments\.mine\.shards",
    ),
    "exact scores of float16 features": (
        {"projection": "exact", "features_dtype": "float16"},
        r"With `projection: exact`, no features are stored\. Found features_dtype float16",
    ),
    "distortion of nothing": (
        {"projection": "exact", "distortion": {}},
        r"With `projection: exact`, nothing is projected: .* Found distortion\. Leave it out",
    ),
    "distortion of so many samples": (
        {"distortion": {"samples": 343}},
        r"distortion: unknown key 'samples'\.",
    ),
    "out of range": (
        {"scoring": {"damping": -1}},
        r"scoring\.damping: must be at least 0\. Found -1",
    ),
    "power": (
        {"scoring": {"loss_weight_power": 0}},
        r"scoring\.loss_weight_power: must be above 0\. Found 0",
    ),
    "unknown model output": (
        {"model_output": "classification"},
        r"model_output: must be one of image_classification, .*, clip\. Found 'classification'",
    ),
    "several at once": (
        {"projection": {"seed": -1}, "model_output": "x"},
        r"model_output: must be .* projection\.seed: must be at least 0",
    ),
    "no study": ({"study": "gone.py"}, r"gone\.py: the study's Python file must exist"),
    "no checkpoint": (
        {"checkpoints": {"c0": "gone.pt", "c1": "lost"}},
        r"Checkpoints must exist\. Found nothing at: gone\.pt, lost",
    ),
    "no checkpoint at all": ({"checkpoints": {}}, r"checkpoints: must not be empty"),
    "no table": ({"checkpoints": "gone.tsv"}, r"gone\.tsv: the table must exist"),
    "checkpoint id": (
        {"checkpoints": {"../c0": "c0.pt"}},
        r"A checkpoint's id becomes a file name.*Found '\.\./c0'",
    ),
    "arguments without training": (
        {"checkpoints": {"c0": {"seed": 1}}},
        r"Found \{'seed': 1\} for checkpoint 'c0', without `training`",
    ),
    "path with training": (
        {"training": {}},
        r"Found 'c0\.pt' for checkpoint 'c0', with `training`",
    ),
    "empty experiment": (
        {"experiments": {"mine": {"targets": []}}},
        r"experiments\.mine\.targets: must not be empty\. Found \[\]",
    ),
    "no experiment": ({"experiments": {}}, r"experiments: must not be empty"),
    "experiment called train": (
        {"experiments": {"train": {"targets": ["patient-342"]}}},
        r"experiments: must be as its meaning says\. Found 'train'\. Meaning: A name",
    ),
    "unknown target": (
        {"experiments": {"mine": {"targets": ["patient-1"]}}},
        r"experiment mine: Targets must be ids .* Found patient-1; it has 100, such as patient-342",
    ),
    "parameter pattern": (
        {"parameters": ["head.*"]},
        r"Every pattern under `parameters` must match .* Found 'head\.\*', .* 0\.weight, 0\.bias",
    ),
    "NaN": (
        {"scoring": {"damping": float("nan")}},
        r"scoring\.damping: must be a finite number\. Found nan\. Meaning: lambda",
    ),
    "infinity": (
        {"scoring": {"damping": float("inf")}},
        r"scoring\.damping: must be a finite number\. Found inf",
    ),
    "a huge number": (
        {"scoring": {"damping": 1e300}},
        r"scoring\.damping: must be at most 1000000000\.0\. Found 1e\+300",
    ),
    "a huge seed": (
        {"projection": {"seed": 2**64}},
        r"projection\.seed: must be at most 18446744073709551615\. Found 18446744073709551616",
    ),
    "no dimensions": (
        {"projection": {"proj_dim": 0}},
        r"projection\.proj_dim: must be at least 1\. Found 0",
    ),
    "yes for a number": (
        {"compute": {"batch_size": True}},
        r"compute\.batch_size: must be an integer\. Found True",
    ),
    "a section without keys": ({"scoring": None}, r"scoring: must be a mapping\. Found None"),
    "a date": (
        {"training": {"start": datetime.date(2024, 1, 1)}},
        r"training\.start: a value must be text, a number, .* datetime\.date\(2024, 1, 1\): put it",
    ),
    "a date in a list": (
        {"experiments": {"mine": {"targets": [datetime.date(2024, 1, 1)]}}},
        r"experiments\.mine\.targets\[0\]: a value must be text",
    ),
    "no required key": (
        {"model_output": None, "experiments": None},
        r"experiments: must be a mapping\. Found None",
    ),
    "a study that is no Python file": (
        {"study": "study.yaml"},
        r"study\.yaml: the study's Python file must .* ends with \.py; .* a file of another kind",
    ),
    "a study without a name": ({"study": ""}, r"study: must not be empty\. Found ''"),
    "a checkpoint's id with a path": (
        {"checkpoints": {"a/../../c0": "c0.pt"}},
        r"A checkpoint's id becomes a file name.*Found 'a/\.\./\.\./c0'",
    ),
    "a checkpoint's id that ends a line": (
        {"checkpoints": {"c0\n": "c0.pt"}},
        r"A checkpoint's id becomes a file name.*Found 'c0\\n'",
    ),
    "a checkpoint's id with a command": (
        {"checkpoints": {"$(touch ran)": "c0.pt"}},
        r"A checkpoint's id becomes a file name.*Found '\$\(touch ran\)'",
    ),
    "an experiment's name with a path": (
        {"experiments": {"../mine": {"targets": ["patient-342"]}}},
        r"experiments: must be as its meaning says\. Found '\.\./mine'\. Meaning: A name",
    ),
    "an experiment's name with a command": (
        {"experiments": {"`touch ran`;": {"targets": ["patient-342"]}}},
        r"experiments: must be as its meaning says\. Found '`touch ran`;'\. Meaning: A name",
    ),
    "an experiment's name that ends a line": (
        {"experiments": {"mine\n": {"targets": ["patient-342"]}}},
        r"experiments: must be as its meaning says\. Found 'mine\\n'\. Meaning: A name",
    ),
    "a results folder with a command": (
        {"results": "$(touch ran)"},
        r"results: must be as its meaning says\. Found '\$\(touch ran\)'\. Meaning: Folder of",
    ),
    "a results folder that ends a line": (
        {"results": "results\n"},
        r"results: must be as its meaning says\. Found 'results\\n'\. Meaning: Folder of",
    ),
    "a results folder that is a file": (
        {"results": "c0.pt"},
        r"c0\.pt: the results folder must be one that files can be written to\. Found .* Mend it",
    ),
    "a results folder where none can be": (
        {"results": "/proc/results"},
        r"/proc/results: the results folder must be one that files can be written to\. Found",
    ),
    "a target twice": (
        {"experiments": {"mine": {"targets": ["patient-342", "patient-342"]}}},
        r"experiments\.mine\.targets: must list each once\. Found \['patient-342', 'patient-342'\]",
    ),
    "a target that is no id": (
        {"experiments": {"mine": {"targets": [3.5]}}},
        r"experiments\.mine\.targets\.0: must be an integer or text\. Found 3\.5",
    ),
    "a target in place of a list": (
        {"experiments": {"mine": {"targets": 5}}},
        r"experiments\.mine\.targets: must be text or a list\. Found 5\. Meaning: Ids of",
    ),
    "an experiment without targets": (
        {"experiments": {"mine": {}}},
        r"experiments\.mine: must be a mapping with targets or data\. Found \{\}",
    ),
    "checkpoints that are a list": (
        {"checkpoints": ["c0.pt"]},
        r"checkpoints: must be text or a mapping\. Found \['c0\.pt'\]\. Meaning: Without",
    ),
    "one parameter in place of a list": (
        {"parameters": "0.weight"},
        r"parameters: must be all or a list\. Found '0\.weight'\. Meaning: Parameters to differ",
    ),
    "too many shards": (
        {"compute": {"shards": 1000}},
        r"train_data\(\): shards must not outnumber samples\. Found 1000 shards, 342 samples",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config(workspace, name):
    change, expected = CONFIGS[name]
    assert re.search(expected, message(refuse(workspace, change)))
    assert not list(workspace.folder.rglob("ran"))


REST = yaml.safe_dump({"study": STUDY, **GOOD}).encode()

TEXTS = {
    "a key given twice": (
        REST.replace(b"  c0: c0.pt\n", b"  c0: c0.pt\n  c1: c0.pt\n  c0: other.pt\n"),
        r"study\.yaml: a key must be given once\. Found 'c0' in lines 2 and 4",
    )
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text_of_a_config(workspace, name):
    text, expected = TEXTS[name]
    assert re.search(expected, message(refuse(workspace, text)))


# Snakemake reads a config before this workflow does, and says so itself; what it does not expect
# ends with a traceback, whose last line says as much.
UNREADABLE = {
    "an empty config": (b"", r"Config file must be given as JSON or YAML with keys at top level"),
    "a list": (b"- study\n", r"Config file must be given as JSON or YAML with keys at top level"),
    "broken YAML": (b"study: [\n", r"Config file is not valid JSON or YAML"),
    "a list for a key": (REST + b"? [a, b]\n: c\n", r"Config file is not valid JSON or YAML"),
    "a config that is not UTF-8": (REST + b"# caf\xe9\n", r"UnicodeDecodeError: .* byte 0xe9 in"),
    "a config that contains itself": (REST + b"training: &a\n  again: *a\n", r"RecursionError: "),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_config(workspace, name):
    text, expected = UNREADABLE[name]
    output = refuse(workspace, text)
    assert re.search(expected, output), output
    assert ("Traceback" in output) == ("Error: " in expected)


def test_training_arguments_that_train_does_not_take(tmp_path):
    config = {
        "model_output": "image_classification",
        "training": {"epoch": 5},
        "checkpoints": {"c0": {"seed": 0}},
        "experiments": {"mine": {"targets": [1506]}},
    }
    workspace = Workspace.make(tmp_path / "study", "small_digits.py", config)
    assert re.search(
        r"train\(.*\) must take the arguments under `training` and those of the checkpoint\. "
        r"Found \{'epoch': 5, 'seed': 0\} for checkpoint c0: missing a required "
        r"argument: 'steps'",
        message(workspace.fail("-n")),
    )


def test_results_folder_in_any_spelling(workspace):
    text = yaml.safe_dump({"study": STUDY, **GOOD, "results": "./out/"})
    _, output = workspace.snakemake("-n", text=text)
    assert "out/scores/mine.h5" in output
    assert "./out" not in output


def test_another_config_is_not_mixed_with_the_default_one(workspace):
    """Experiments and checkpoints of config/config.yaml must not leak into a user's study."""
    text = yaml.safe_dump({"study": STUDY, **GOOD})
    _, output = workspace.snakemake("-n", text=text)
    assert "results/scores/mine.h5" in output
    assert "mix" not in output
