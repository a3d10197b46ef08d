"""A bad config or study stops before any job, with one message that says what to do."""

import pickle
import re

import pytest
import torch
import yaml
from workspace import Workspace

GOOD = {
    "model_output": "regression",
    "checkpoints": {"c0": "c0.pt"},
    "experiments": {"mine": {"targets": ["patient-342"]}},
}
STUDY = "diabetes.py"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    workspace = Workspace.make(tmp_path_factory.mktemp("bad") / "study", STUDY, GOOD)
    workspace.path("c0.pt").write_bytes(b"not looked at before a job")
    text = workspace.path(STUDY).read_text()
    text = text.replace("x[:342], y[:342]", "x[:342].repeat(10, 1), y[:342].repeat(10)")
    workspace.path("many.py").write_text(text)
    return workspace


def message(output):
    """Return the text of the one error, and make sure that it is all there is."""
    assert "Traceback" not in output
    assert "Job stats" not in output
    assert "jobid" not in output
    found = re.findall(r"^WorkflowError in file .*\n((?:.*\n)*?)  File ", output, flags=re.M)
    assert len(found) == 1, output
    return " ".join(found[0].split())


CONFIGS = {
    "unknown key": (
        {"projecton": {}},
        r"the config: unknown key 'projecton'\. Known keys: study, results",
    ),
    "unknown key inside": (
        {"projection": {"dim": 3}},
        r"projection: unknown key 'dim'\. Known keys: kind, proj_dim, seed",
    ),
    "wrong type": (
        {"projection": {"proj_dim": "many"}},
        r"projection\.proj_dim: must be of type integer\. Found 'many'\. Meaning: k",
    ),
    "a number that is not an integer": (
        {"projection": {"proj_dim": 16.0}},
        r"projection\.proj_dim: must be of type integer\. Found 16\.0",
    ),
    "a name that is a number": (
        {"experiments": {2024: {"targets": ["patient-342"]}}},
        r"experiments: a name must be text\. Found 2024: put it in quotes",
    ),
    "a name like a file's": (
        {"experiments": {"mine.h5": {"targets": ["patient-342"]}}},
        r"experiments: .*'mine\.h5' does not match",
    ),
    "a kind that does not take this proj_dim": (
        {"projection": {"kind": "hadamard", "proj_dim": 48}},
        r"proj_dim must be a power of two for the projection kind hadamard\. Found 48",
    ),
    "too little memory": (
        {"projection": {"proj_dim": 4096}, "compute": {"memory_mb": 200}},
        r"compute\.memory_mb must hold the normal matrix of proj_dim 4096: \d+ MiB\. Found 200",
    ),
    "too many checkpoints": (
        {"checkpoints": {f"c{i}": "c0.pt" for i in range(700)}},
        r"at most about 500 checkpoints.*Found 700",
    ),
    "a projection by its name alone": (
        {"projection": "rademacher"},
        r"projection: must be exact\. Found 'rademacher'\. Meaning: No projection, .* by its keys",
    ),
    "a projection of another type": (
        {"projection": 512},
        r"projection: 512 is not valid .* Meaning: .*, given by its keys; or `exact`, none",
    ),
    "exact scores that memory does not hold": (
        {"projection": "exact", "compute": {"memory_mb": 64}, "study": "many.py"},
        r"experiment mine: compute\.memory_mb must hold exact scores of 3420 training samples, "
        r"three times 3420 x 3420 numbers, and 1 targets: 268 MiB\. Found 64\. Raise it, take a "
        r"projection in place of `projection: exact`",
    ),
    "exact scores of top influences alone": (
        {"projection": "exact", "scoring": {"scores": "top_k"}},
        r"With `projection: exact`, scoring\.scores must be full: .* Found top_k",
    ),
    "exact scores in shards": (
        {"projection": "exact", "compute": {"shards": 2}},
        r"With `projection: exact`, shards must be 1: .* Found 2 in compute\.shards",
    ),
    "exact scores of targets in shards": (
        {
            "projection": "exact",
            "experiments": {"mine": {"targets": ["patient-342"], "shards": 3}},
        },
        r"With `projection: exact`, shards must be 1: .* Found 3 in experiments\.mine\.shards",
    ),
    "exact scores of float16 features": (
        {"projection": "exact", "features_dtype": "float16"},
        r"With `projection: exact`, no features are stored\. Found features_dtype float16",
    ),
    "diagnostics of nothing": (
        {"projection": "exact", "diagnostics": {}},
        r"With `projection: exact`, nothing is projected, .* Found diagnostics\. Leave them out",
    ),
    "diagnostics without pairs or standard errors": (
        {"diagnostics": {"samples": 1, "streams": 1}},
        r"diagnostics\.samples: must be at least 2\. Found 1\. .* "
        r"diagnostics\.streams: must be at least 2\. Found 1\.",
    ),
    "diagnostics of too many samples": (
        {"diagnostics": {"samples": 343}},
        r"diagnostics\.samples must not exceed the training samples\. Found 343 of 342\. Lower it",
    ),
    "diagnostics that memory does not hold": (
        {"diagnostics": {"samples": 342, "streams": 200}, "compute": {"memory_mb": 200}},
        r"compute\.memory_mb must hold diagnostics of 342 samples under 200 streams of proj_dim "
        r"1024: 289 MiB\. Found 200\. Raise it, lower diagnostics\.samples or diagnostics\.streams",
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
        r"experiments: .*'train' does not match",
    ),
    "unknown target": (
        {"experiments": {"mine": {"targets": ["patient-1"]}}},
        r"experiment mine: Targets must be ids .* Found patient-1; it has 100, such as patient-342",
    ),
    "parameter pattern": (
        {"parameters": ["head.*"]},
        r"Every pattern under `parameters` must match .* Found 'head\.\*', .* 0\.weight, 0\.bias",
    ),
    "too many shards": (
        {"compute": {"shards": 1000}},
        r"train_data\(\): shards must not outnumber samples\. Found 1000 shards, 342 samples",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config(workspace, name):
    change, expected = CONFIGS[name]
    text = yaml.safe_dump({"study": STUDY, **GOOD, **change}, sort_keys=False)
    assert re.search(expected, message(workspace.fail("-n", text=text)))


def test_a_key_given_twice(workspace):
    text = yaml.safe_dump({"study": STUDY, **GOOD})
    text = text.replace("  c0: c0.pt\n", "  c0: c0.pt\n  c1: c0.pt\n  c0: other.pt\n")
    found = message(workspace.fail("-n", text=text))
    assert re.search(r"study\.yaml: a key must be given once\. Found 'c0' in lines 2 and 4", found)


def test_two_checkpoints_with_one_id_in_a_table(workspace):
    workspace.path("table.tsv").write_text("checkpoint\tpath\nc0\tc0.pt\nc0\tother.pt\n")
    text = yaml.safe_dump({"study": STUDY, **GOOD, "checkpoints": "table.tsv"})
    found = message(workspace.fail("-n", text=text))
    assert "A checkpoint's id must be its own. Found 'c0' twice." in found


def test_ids_that_differ_in_type_alone(workspace):
    text = yaml.safe_dump({"study": STUDY, **GOOD, "checkpoints": {1: "c0.pt", "1": "c0.pt"}})
    assert "Found '1' twice" in message(workspace.fail("-n", text=text))


def test_a_study_that_prints(workspace):
    """What it prints, at any time, is shown and is not taken for an answer."""
    path = workspace.path(STUDY)
    good = path.read_text()
    noise = "\nimport atexit\nprint('loading')\natexit.register(print, 'the end')\n"
    try:
        path.write_text(good + noise)
        result = workspace.snakemake("-n", text=yaml.safe_dump({"study": STUDY, **GOOD}))
    finally:
        path.write_text(good)
    assert result.returncode == 0, result.stdout
    assert "loading" in result.stdout
    assert "the end" in result.stdout


def test_results_folder_in_any_spelling(workspace):
    text = yaml.safe_dump({"study": STUDY, **GOOD, "results": "./out/"})
    output = workspace.snakemake("-n", text=text).stdout
    assert "out/scores/mine.h5" in output
    assert "./out" not in output


def test_tables_work(workspace):
    workspace.path("checkpoints.tsv").write_text("checkpoint\tpath\nc0\tc0.pt\n")
    workspace.path("targets.tsv").write_text("id\npatient-342\n")
    tables = {
        "checkpoints": "checkpoints.tsv",
        "experiments": {"mine": {"targets": "targets.tsv"}},
    }
    text = yaml.safe_dump({"study": STUDY, **GOOD, **tables})
    result = workspace.snakemake("-n", text=text)
    assert result.returncode == 0, result.stdout


STUDIES = {
    "no model function": (
        ("def make_model", "def build_model"),
        r"the study must define a function make_model\(\)\. Found build_model, train_data",
    ),
    "model function returns no model": (
        ("return nn.Sequential(", "return list(nn.Sequential("),
        r"make_model\(\) must return a torch\.nn\.Module\. Found",
    ),
    "no data": (("x[:342], y[:342]", "x[:0], y[:0]"), r"train_data\(\) must hold samples"),
    "label not finite": (
        ("y.std()\n", "y.std()\ny[7] = float('nan')\n"),
        r"train_data\(\): Labels must be finite numbers\. Found nan in sample 7",
    ),
    "ids too few": (
        ("range(342, 442)", "range(342, 400)"),
        r"target_ids\(\) must give one id a sample\. Found 58 ids, 100 samples",
    ),
    "ids twice": (
        ("patient-{i}", "patient-{i // 2}"),
        r"target_ids\(\) must give every sample its own id",
    ),
    "sample does not fit the model": (
        ("nn.Linear(10, 32)", "nn.Linear(11, 32)"),
        r"Calling the model with one sample of shapes \(1, 10\) failed: RuntimeError",
    ),
    "import fails": (("import torch\n", "import torch\nimport no_such_module\n"), "no_such_module"),
}


@pytest.mark.parametrize("name", STUDIES)
def test_bad_study(workspace, name):
    (old, new), expected = STUDIES[name]
    path = workspace.path(STUDY)
    good = path.read_text()
    assert old in good
    try:
        changed = good.replace(old, new)
        if "list(" in new:
            changed = changed.replace("nn.Linear(32, 1))", "nn.Linear(32, 1)))")
        path.write_text(changed)
        output = workspace.fail("-n", text=yaml.safe_dump({"study": STUDY, **GOOD}))
    finally:
        path.write_text(good)
    assert re.search(expected, " ".join(output.split()))
    assert "Job stats" not in output
    if name != "import fails":  # an error of the user's own code comes with its traceback
        message(output)


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


def test_label_out_of_range(tmp_path):
    config = {**GOOD, "model_output": "image_classification"}
    config["experiments"] = {"mine": {"targets": [1506]}}
    workspace = Workspace.make(tmp_path / "study", "small_digits.py", config)
    workspace.path("c0.pt").write_bytes(b"")
    study = workspace.path("small_digits.py")
    study.write_text(study.read_text().replace("nn.Linear(16, 10)", "nn.Linear(16, 9)"))
    found = message(workspace.fail("-n"))
    assert re.search(
        r"train_data\(\): Labels must be integers from 0 to 8, the classes of the study's model\. "
        r"Found 9 in sample \d+",
        found,
    )


def test_a_malicious_checkpoint_is_refused_without_running(workspace, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    workspace.path("evil.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    text = yaml.safe_dump({"study": STUDY, **GOOD, "checkpoints": {"evil": "evil.pt"}})
    output = workspace.fail("scores", text=text)
    assert re.search(r"Error: evil\.pt: a checkpoint must be a state dict", output)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_model(workspace):
    torch.save({"0.weight": torch.zeros(32, 9), "old.bias": torch.zeros(3)}, workspace.path("w.pt"))
    text = yaml.safe_dump({"study": STUDY, **GOOD, "checkpoints": {"w": "w.pt"}})
    output = " ".join(workspace.fail("scores", text=text).split())
    assert re.search(
        r"missing in the checkpoint: 0\.bias, 2\.weight, 2\.bias; unknown to the model: old\.bias; "
        r"of another shape: 0\.weight \(32, 9\) for \(32, 10\)",
        output,
    )


def test_another_config_is_not_mixed_with_the_default_one(workspace):
    """Experiments and checkpoints of config/config.yaml must not leak into a user's study."""
    text = yaml.safe_dump({"study": STUDY, **GOOD})
    output = workspace.snakemake("-n", text=text).stdout
    assert "results/scores/mine.h5" in output
    assert "mix" not in output
