"""Bad input stops before any job, or at the job that reads it, with one message.

It says what must hold, what was found, and what to do. All of it is counted at the end.
"""

import datetime
import json
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn
from workspace import Workspace

from trak_core.errors import InputError
from trak_core.stages.check_study import check_study
from trak_core.stages.features import compute_features

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


class Door:
    """Snakemake's command without its start; see snakemake_door.py."""

    def __init__(self, process, workspace):
        self.process, self.workspace = process, workspace

    def dry_run(self, config):
        """Try a config, of values or as bytes, and return exit status and output."""
        if not isinstance(config, bytes):
            values = {"study": STUDY, **GOOD, **config}
            config = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()
        self.workspace.path("study.yaml").write_bytes(config)
        output = self.workspace.path("output.txt")
        arguments = ["--configfile", "study.yaml", "--cores", "2", "-n"]
        request = [str(self.workspace.folder), arguments, str(output)]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()), output.read_text()

    def refuse(self, config):
        status, output = self.dry_run(config)
        assert status != 0, output
        return output


@pytest.fixture(scope="module")
def door(workspace):
    command = (sys.executable, Path(__file__).with_name("snakemake_door.py"))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Door(process, workspace)
        process.stdin.close()


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
        r"compute\.batch_size: must be of type integer\. Found True",
    ),
    "a section without keys": (
        {"scoring": None},
        r"scoring: must be of type object\. Found None",
    ),
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
        r"experiments: must be of type object\. Found None",
    ),
    "a study that is no Python file": (
        {"study": "study.yaml"},
        r"study\.yaml: the study's Python file must .* ends with \.py; .* a file of another kind",
    ),
    "a study without a name": ({"study": ""}, r"study: '' should be non-empty"),
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
        r"experiments: '\.\./mine' does not match",
    ),
    "an experiment's name with a command": (
        {"experiments": {"`touch ran`;": {"targets": ["patient-342"]}}},
        r"experiments: '`touch ran`;' does not match",
    ),
    "an experiment's name that ends a line": (
        {"experiments": {"mine\n": {"targets": ["patient-342"]}}},
        r"experiments: 'mine\\n' does not match",
    ),
    "a results folder with a command": (
        {"results": "$(touch ran)"},
        r"results: '\$\(touch ran\)' does not match",
    ),
    "a results folder that ends a line": (
        {"results": "results\n"},
        r"results: 'results\\n' does not match",
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
        r"experiments\.mine\.targets: .*'patient-342'.* has non-unique elements",
    ),
    "a target that is no id": (
        {"experiments": {"mine": {"targets": [3.5]}}},
        r"experiments\.mine\.targets\.0: must be of type .*integer.*\. Found 3\.5",
    ),
    "too many shards": (
        {"compute": {"shards": 1000}},
        r"train_data\(\): shards must not outnumber samples\. Found 1000 shards, 342 samples",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_bad_config(door, name):
    change, expected = CONFIGS[name]
    assert re.search(expected, message(door.refuse(change)))
    assert not list(door.workspace.folder.rglob("ran"))


REST = yaml.safe_dump({"study": STUDY, **GOOD}).encode()
TEXTS = {
    "a key given twice": (
        REST.replace(b"  c0: c0.pt\n", b"  c0: c0.pt\n  c1: c0.pt\n  c0: other.pt\n"),
        r"study\.yaml: a key must be given once\. Found 'c0' in lines 2 and 4",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text_of_a_config(door, name):
    text, expected = TEXTS[name]
    assert re.search(expected, message(door.refuse(text)))


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
def test_what_is_no_config(door, name):
    text, expected = UNREADABLE[name]
    output = door.refuse(text)
    assert re.search(expected, output), output
    assert ("Traceback" in output) == ("Error: " in expected)


TABLES = {
    "a table without lines": (
        b"",
        r"columns checkpoint, path, each once\. Missing: checkpoint, path",
    ),
    "a table without rows": (
        b"checkpoint\tpath\n",
        r"the table must have rows\. Found only a header",
    ),
    "a table of other columns": (
        b"id\tfile\nc0\tc0.pt\n",
        r"columns checkpoint, path, each once\. Missing: checkpoint, path; found id, file",
    ),
    "a column twice": (
        b"checkpoint\tpath\tpath\nc0\tc0.pt\tc1.pt\n",
        r"columns checkpoint, path, each once\. Missing: none; found checkpoint, path, path",
    ),
    "a table with commas": (
        b"checkpoint,path\nc0,c0.pt\n",
        r"must be tab-separated .* Missing: checkpoint, path; found checkpoint,path",
    ),
    "a table that is not UTF-8": (
        b"checkpoint\tpath\nc0\tcaf\xe9.pt\n",
        r"the table must be tab-separated text in UTF-8\. Reading it failed: 'utf-8' codec",
    ),
    "a table with a null byte": (
        b"checkpoint\tpath\nc0\tc0\0.pt\n",
        r"Checkpoints must exist\. Found nothing at: c0\0\.pt",
    ),
    "a quote without an end": (
        b'checkpoint\tpath\nc0\t"c0.pt\nc1\tc0.pt\n',
        r"the table must be tab-separated text in UTF-8\. .* unexpected end of data",
    ),
    "a row without a path": (
        b"checkpoint\tpath\nc0\n",
        r"must fill the columns checkpoint, path\. Found 'c0', '' in line 2",
    ),
    "an id twice": (
        b"checkpoint\tpath\nc0\tc0.pt\nc0\tother.pt\n",
        r"A checkpoint's id must be its own\. Found 'c0' twice",
    ),
    "an id with a path": (
        b"checkpoint\tpath\n../../c0\tc0.pt\n",
        r"A checkpoint's id becomes a file name.*Found '\.\./\.\./c0'",
    ),
    "a path to nothing": (
        b"checkpoint\tpath\nc0\t$(touch ran)\n",
        r"Checkpoints must exist\. Found nothing at: \$\(touch ran\)",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_bad_table(door, name):
    content, expected = TABLES[name]
    door.workspace.path("table.tsv").write_bytes(content)
    assert re.search(expected, message(door.refuse({"checkpoints": "table.tsv"})))
    assert not list(door.workspace.folder.rglob("ran"))


def test_ids_that_differ_in_type_alone(door):
    output = door.refuse({"checkpoints": {1: "c0.pt", "1": "c0.pt"}})
    assert "Found '1' twice" in message(output)


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
        ("return nn.Sequential(", "return len, (nn.Sequential, "),
        r"make_model\(\) must return a torch\.nn\.Module\. Found tuple",
    ),
    "model function fails": (
        ("return nn.Sequential(", "return nn.Sequentially("),
        r"make_model\(\) must end without an error\. Found AttributeError: .* 'Sequentially' .*"
        r"line \d+, in make_model",
    ),
    "no data": (("x[:342], y[:342]", "x[:0], y[:0]"), r"train_data\(\) must hold samples"),
    "data is a number": (
        ("return TensorDataset(x[:342], y[:342])", "return 342"),
        r"train_data\(\) must return samples with len\(\) and \[i\], .* Found int",
    ),
    "data fails": (
        ("return TensorDataset(x[:342], y[:342])", "return open('gone.csv')"),
        r"train_data\(\) must end without an error\. Found FileNotFoundError: .*gone\.csv",
    ),
    "data without numbers": (
        ("return TensorDataset(x[:342], y[:342])", "return {'a': 1}"),
        r"reading sample 0 must end without an error\. Found KeyError: 0",
    ),
    "sample is a number": (
        ("return TensorDataset(x[:342], y[:342])", "return list(range(342))"),
        r"A sample must be a tuple or a dict\. Found int",
    ),
    "samples of text": (
        ("return TensorDataset(x[:342], y[:342])", "return [('a', 1.0)] * 342"),
        r"Samples must be tuples or dicts of tensors or numbers\. Found str for entry 0",
    ),
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
    "ids are a number": (
        ('return [f"patient-{i}" for i in range(342, 442)]', "return 100"),
        r"target_ids\(\), .*, must end without an error\. Found TypeError: 'int' object is not it",
    ),
    "ids are lists": (
        ('f"patient-{i}"', "[i]"),
        r"target_ids\(\) must give integers of 64 bits only, or strings .* Found \[342\], \[343\]",
    ),
    "ids with a null byte": (
        ("patient-{i}", "patient-{i}\\0"),
        r"strings of 1 to 64 bytes of printable text only\. Found 'patient-342\\x00'",
    ),
    "ids on two lines": (
        ("patient-{i}", "patient\\n{i}"),
        r"strings of 1 to 64 bytes of printable text only\. Found 'patient\\n342'",
    ),
    "ids beyond 64 bits": (
        ('f"patient-{i}"', "i + 2**63 - 400"),
        r"target_ids\(\) must give integers of 64 bits only, .* Found 9223372036854775808",
    ),
    "ids of two types": (
        ('f"patient-{i}"', "i if i % 2 else str(i)"),
        r"target_ids\(\) must give integers of 64 bits only, or strings .* Found 343, 345, 347",
    ),
    "sample does not fit the model": (
        ("nn.Linear(10, 32)", "nn.Linear(11, 32)"),
        r"Calling the model with one sample of shapes \(1, 10\) failed: RuntimeError",
    ),
    "import fails": (
        ("import torch\n", "import torch\nimport no_such_module\n"),
        r"the study's file must end without an error\. Found ModuleNotFoundError: .*"
        r"'no_such_module' .*line 4, in <module>",
    ),
    "study leaves Python": (
        ("import torch\n", "import torch\nimport sys\nsys.exit(0)\n"),
        r"the study's file must end without an error\. Found SystemExit: 0",
    ),
    "study raises": (
        ("import torch\n", "import torch\nraise RuntimeError('no data here')\n"),
        r"the study's file must end without an error\. Found RuntimeError: no data here",
    ),
}


def edited(workspace, name, old, new):
    """Write the study with something else in it, under a name of its own."""
    good = workspace.path(STUDY).read_text()
    assert old in good
    path = workspace.path(f"{re.sub(r'[^a-z]', '_', name)}.py")
    path.write_text(good.replace(old, new))
    return path


@pytest.mark.parametrize("name", STUDIES)
def test_bad_study(workspace, name):
    (old, new), expected = STUDIES[name]
    path = edited(workspace, name, old, new)
    with pytest.raises(InputError) as error:
        check_study(
            study=path,
            model_output="regression",
            weighting="plain",
            parameters=None,
            training=None,
            splits={"train": None, "mine": ["patient-342"]},
            shards={"train": 1, "mine": 1},
        )
    found = " ".join(str(error.value).split())
    assert re.search(expected, found)
    assert str(path) in found


@pytest.mark.parametrize("name", ["no model function", "study raises", "study leaves Python"])
def test_snakemake_says_what_is_bad_about_a_study(door, name):
    (old, new), expected = STUDIES[name]
    path = edited(door.workspace, name, old, new)
    assert re.search(expected, message(door.refuse({"study": path.name})))


def test_a_study_that_crashes(door):
    path = edited(door.workspace, "crash", "import torch\n", "import os\nos.abort()\n")
    found = message(door.refuse({"study": path.name}))
    assert re.search(
        r"crash\.py: the study must load\. .* ended with exit status -6 and with", found
    )


TEXTS_OF_A_STUDY = {
    "a study with a null byte": (b"a = 1\0\n", r"The study must be Python\. Found in .*bytes\.py"),
    "a study that is not UTF-8": (b"a = '\xe9'\n", r"The study must be Python\. Found .*utf-8"),
    "a study with a mistake": (b"def f(:\n", r"The study must be Python\. Found in .*, line 1: in"),
}


@pytest.mark.parametrize("name", TEXTS_OF_A_STUDY)
def test_what_is_no_python(door, name):
    content, expected = TEXTS_OF_A_STUDY[name]
    door.workspace.path("bytes.py").write_bytes(content)
    assert re.search(expected, message(door.refuse({"study": "bytes.py"})))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def net():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))


def changed(**values):
    state = {key: value.clone() for key, value in net().state_dict().items()}
    return {**state, **{key.replace("_", "."): value for key, value in values.items()}}


def saved(path, state):
    torch.save(state, path)


def cut(path):
    saved(path, changed())
    path.write_bytes(path.read_bytes()[:-300])


def flipped(path):
    state = changed()
    saved(path, state)
    data = bytearray(path.read_bytes())
    data[data.index(state["0.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(data)


def marked_as_folder(path):
    """torch alone returns memory that nothing was read into."""
    saved(path, changed())
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(b"/data/0"))
    data[entry + 38] ^= 0x10
    path.write_bytes(data)


def bomb(path):
    saved(path, changed())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data/9", bytes(2**24))


def index_outside(path):
    path.mkdir()
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../a.pt"}}')


def empty_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("")


def cut_safetensors(path):
    save_file(changed(), path)
    path.write_bytes(path.read_bytes()[:-10])


NO_STATE = (
    r"a checkpoint must be a state dict saved by torch\.save, or safetensors; .* Reading it fa"
)
CHECKPOINTS = {
    "no file": (lambda path: None, r"a checkpoint must exist\. Found nothing there"),
    "an empty file": (lambda path: path.write_bytes(b""), NO_STATE),
    "text": (lambda path: path.write_text("weights"), NO_STATE),
    "a cut file": (cut, NO_STATE),
    "a cut safetensors file": (cut_safetensors, NO_STATE),
    "a flipped bit": (flipped, r"the checksum of its part \S*/data/0 differs: the file is damaged"),
    "a part marked as a folder": (marked_as_folder, r"a part is a folder: the file is damaged"),
    "a bomb": (bomb, r"its parts are larger than the file: torch\.save never compresses"),
    "a whole model": (lambda path: saved(path, net()), NO_STATE),
    "a pickle that runs code": (lambda path: saved(path, Evil(path.with_name("ran"))), NO_STATE),
    "a bare pickle that runs code": (
        lambda path: path.write_bytes(pickle.dumps({"0.weight": Evil(path.with_name("ran"))})),
        NO_STATE,
    ),
    "a list of tensors": (
        lambda path: saved(path, list(changed().values())),
        r"must be a state dict \(names to tensors\).* Found list with no keys",
    ),
    "keys that are numbers": (
        lambda path: saved(path, {1: torch.zeros(1)}),
        r"must be a state dict \(names to tensors\).* Found dict with 1",
    ),
    "keys missing, keys unknown": (
        lambda path: saved(path, {"old.bias": torch.zeros(3)}),
        r"missing in the checkpoint: 0\.weight, .*; unknown to the model: old\.bias",
    ),
    "another shape": (
        lambda path: saved(path, changed(**{"0_weight": torch.zeros(32, 9)})),
        r"of another shape: 0\.weight \(32, 9\) for \(32, 10\)",
    ),
    "quantized weights": (
        lambda path: saved(path, changed(**{"0_weight": torch.ones(32, 10, dtype=torch.int8)})),
        r"of another type: 0\.weight torch\.int8, torch\.strided for torch\.float32",
    ),
    "sparse weights": (
        lambda path: saved(path, changed(**{"2_weight": torch.ones(1, 32).to_sparse()})),
        r"of another type: 2\.weight torch\.float32, torch\.sparse_coo for torch\.float32",
    ),
    "complex weights": (
        lambda path: saved(path, changed(**{"2_bias": torch.ones(1, dtype=torch.complex64)})),
        r"of another type: 2\.bias torch\.complex64",
    ),
    "NaN in the weights": (
        lambda path: saved(path, changed(**{"2_bias": torch.tensor([float("nan")])})),
        r"a checkpoint's weights must be finite\. Found NaN or infinity in 2\.bias\. Take",
    ),
    "infinity in the weights": (
        lambda path: saved(path, changed(**{"2_bias": torch.tensor([float("inf")])})),
        r"a checkpoint's weights must be finite\. Found NaN or infinity in 2\.bias\. Take",
    ),
    "gradients that overflow": (
        lambda path: saved(path, changed(**{"2_weight": torch.full((1, 32), 3e38)})),
        r"Per-sample gradients must be finite\. Found NaN or infinity for the samples",
    ),
    "an empty folder": (empty_folder, r"must hold one of model\.safetensors.* Found notes\.txt"),
    "an index that leaves its folder": (
        index_outside,
        r"the index of a checkpoint folder must .* '\.\./\.\./a\.pt' is not a file of this folder",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bad_checkpoint(workspace, tmp_path, name):
    write, expected = CHECKPOINTS[name]
    path = tmp_path / ("c0.safetensors" if "safetensors" in name else "c0.pt")
    write(path)
    with pytest.raises(InputError) as error:
        compute_features(
            features=tmp_path / "out.h5",
            checkpoint=path,
            study=workspace.path(STUDY),
            split="train",
            shard=1,
            n_shards=1,
            spec={
                "checkpoint": "c0",
                "model_output": "regression",
                "parameter_patterns": None,
                "projection": {"kind": "rademacher", "proj_dim": 4, "seed": 0},
                "dtype": "float32",
                "targets": None,
                "study": "digest",
            },
            code="code",
            device="cpu",
            batch_size=64,
            memory_mb=500,
            threads=1,
        )
    assert re.search(expected, str(error.value))
    assert not (tmp_path / "out.h5").exists()
    assert not (tmp_path / "ran").exists()


def test_bad_input_is_counted():
    """Every one of them has a message of its own to look for."""
    tables = [CONFIGS, TEXTS, UNREADABLE, TABLES, STUDIES, TEXTS_OF_A_STUDY, CHECKPOINTS]
    names = [name for table in tables for name in table]
    assert len(set(names)) == len(names) >= 120
    assert all(expected for table in tables for _, expected in table.values())


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
    """By a real job; more of them are among CHECKPOINTS."""
    workspace.path("evil.pt").write_bytes(pickle.dumps({"weight": Evil(tmp_path / "ran")}))
    text = yaml.safe_dump({"study": STUDY, **GOOD, "checkpoints": {"evil": "evil.pt"}})
    output = workspace.fail("scores", text=text)
    assert re.search(r"Error: evil\.pt: a checkpoint must be a state dict", output)
    assert not (tmp_path / "ran").exists()


def test_another_config_is_not_mixed_with_the_default_one(workspace):
    """Experiments and checkpoints of config/config.yaml must not leak into a user's study."""
    text = yaml.safe_dump({"study": STUDY, **GOOD})
    output = workspace.snakemake("-n", text=text).stdout
    assert "results/scores/mine.h5" in output
    assert "mix" not in output
