"""`trak init`: the configs that it writes for folders, and its report."""

import json
import re
from itertools import pairwise
from pathlib import Path
from shutil import rmtree

import pytest
import torch
import yaml
from folders import write
from refused import refused

from trak_core.command.init import config_for, init
from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.config.checkpoint_list import checkpoint_table
from trak_core.config.read_config import check_config

pytestmark = pytest.mark.usefixtures("here")
SCHEMA = yaml.safe_load(
    (Path(__file__).parents[2] / "workflow/schemas/config.schema.yaml").read_text()
)
CAUSAL = json.dumps({"architectures": ["GPT2LMHeadModel"], "n_embd": 4})
CLASSIFIER = json.dumps({"architectures": ["BertForSequenceClassification"]})
ROWS = {"train.csv": "a,label\n1,0\n"}
TEXTS = '{"text": "red", "id": "a"}\n{"text": "blue", "id": "b"}\n'


def written(files, *words):
    """Write the config for files, check it as a start does without loading models, return it."""
    write(files)
    init(words)
    text = Path("trak.yaml").read_text()
    config = yaml.safe_load(text)
    whole = with_ready_study(config)
    check_config(whole, SCHEMA)
    checkpoints = checkpoint_table(whole["checkpoints"], None).values()
    assert all(Path(checkpoint.path or "none").exists() for checkpoint in checkpoints)
    return config


def test_weights_and_texts(capsys):
    files = {"out/config.json": CAUSAL, "train.jsonl": TEXTS, "asked.jsonl": TEXTS}
    assert written(files) == {
        "study": "language_model",
        "projection": {"proj_dim": 4096},
        "scoring": {"damping": 1},
        "study_arguments": {"texts": "train.jsonl"},
        "checkpoints": {"out": "out"},
        "experiments": {"asked": {"data": "asked.jsonl"}},
        "results": "results-trak",
    }
    assert re.findall(r"check: (\w+)", capsys.readouterr().out) == ["texts"]
    before = Path("trak.yaml").read_text()
    with refused("command.config_name", "trak.yaml"):
        init(["out"])
    assert Path("trak.yaml").read_text() == before


def test_a_json_list_of_rows_differs_from_settings():
    rows = json.dumps([{"instruction": "say", "input": "", "output": "red"}] * 2)
    files = {"out/config.json": CAUSAL, "names.json": '["red", "blue"]', "settings.json": "{}"}
    config = written({**files, "train.json": rows, "test.json": f" \n{rows}"})
    assert config["study_arguments"]["texts"] == "train.json"
    assert config["experiments"] == {"asked": {"data": "test.json"}}


def test_each_config_has_a_results_folder_that_does_not_exist_yet():
    write({"out/config.json": CAUSAL, "train.jsonl": TEXTS})
    Path("more").mkdir()
    for config, results in (
        ("trak.yaml", "results-trak"),
        ("more/my 2nd.yaml", "results-my_2nd"),
        ("trak.yaml", "results-trak-2"),
    ):
        init(["--config", config])
        assert yaml.safe_load(Path(config).read_text())["results"] == results
        Path(results).mkdir()
        Path(config).unlink()


def test_a_trainer_s_folder_without_a_second_file():
    saved = {f"a b/run-1/checkpoint-{step}/config.json": CAUSAL for step in (4, 12)}
    config = written({**saved, "a b/yes.jsonl": TEXTS}, "a b")
    assert config["checkpoints"] == {"run_1": "a b/run-1"}
    assert list(checkpoint_table(config["checkpoints"], None)) == ["run_1-12", "run_1-4"]
    assert config["study_arguments"] == {"texts": "a b/yes.jsonl", "targets": "a b/yes.jsonl"}
    assert config["experiments"] == {"asked": {"targets": ["a", "b"]}}


@pytest.mark.parametrize("kind", ["texts", "table"])
def test_data_of_another_project_are_left_out(kind, capsys):
    """Data that are nearer to other weights are theirs, even if their names fit better."""
    rows, ending = (TEXTS, "jsonl") if kind == "texts" else ("a,label\n0.5,1\n", "csv")
    own = {"A/sft.": rows, "A/test.": rows, "B/train.": rows * 9, "B/eval.": rows}
    files = {f"{name}{ending}": text for name, text in own.items()}
    for n, project in enumerate("AB", 4):
        if kind == "texts":
            files[f"{project}/out/config.json"] = CAUSAL.replace("4", str(n))
        else:
            files[f"{project}/m.pt"] = {f"w{n}": torch.zeros(2)}
    config = written(files)
    arguments = config["study_arguments"]
    assert arguments["texts" if kind == "texts" else "table"] == f"A/sft.{ending}"
    asked = config["experiments"]["asked"].get("data", arguments.get("targets"))
    assert asked == f"A/test.{ending}"
    assert "nearer to other weights than to A/" in capsys.readouterr().out


def test_data_beside_both_projects_belong_to_each(capsys):
    weights = {f"{name}/out/config.json": CAUSAL.replace("4", name) for name in "12"}
    arguments = written({**weights, "data/train.jsonl": TEXTS, "1/log.jsonl": TEXTS})
    assert arguments["study_arguments"]["texts"] == "data/train.jsonl"
    assert "nearer" not in capsys.readouterr().out


def test_a_folder_whose_weights_do_not_load_is_left_out(capsys):
    write({"out/config.json": CAUSAL, "cut/config.json": CAUSAL, "train.jsonl": TEXTS})
    Path("cut/model.safetensors").write_bytes(b"")
    Path("app").mkdir()
    Path("app/config.json").write_text("{}")
    assert written({})["checkpoints"] == {"out": "out"}
    assert "left out: cut/model.safetensors: " in capsys.readouterr().out


BETWEEN = "any text between the prompt and this field"
LISTS = [[{"role": role, "content": "a"}] for role in ("user", "assistant")]


@pytest.mark.parametrize(
    ("row", "arguments", "told"),
    [
        ({"prompt": "A is", "completion": " B"}, {"text": "{completion}"}, BETWEEN),
        ({"prompt": None, "completion": "B"}, {"text": "{completion}"}, BETWEEN),
        ({"question": "A?", "answer": "B"}, {"prompt": "{question}", "text": "{answer}"}, BETWEEN),
        (
            {"instruction": "A", "input": "in", "output": " B"},
            {"prompt": "{instruction}", "text": "{output}"},
            "and input, if training read it",
        ),
        ({"sentence": "A B"}, {"text": "{sentence}"}, "or an end token"),
        ({"text": "A B", "prompt": "p"}, {}, "such as an end token, add a template"),
        # The chat template joins these.
        ({"prompt": LISTS[0], "completion": LISTS[1]}, {}, None),
        ({"messages": [*LISTS[0], *LISTS[1]]}, {}, None),
    ],
)
def test_templates_add_no_character_to_the_fields(row, arguments, told, capsys):
    files = {"out/config.json": CAUSAL, "train.jsonl": json.dumps(row) + "\n"}
    given = written(files)["study_arguments"]
    templates = {key: given[key] for key in ("prompt", "text") if key in given}
    assert templates == arguments
    # The comment is in the config, and is printed.
    for text in (capsys.readouterr().out, Path("trak.yaml").read_text()):
        assert ("end token" in text) == (told is not None)
        assert told is None or told in text


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        (["007", "040", "100"], "leading zeros are codes: no"),
        (["7", "40", "100"], None),
        (["0", "0.5", "0.25"], None),
    ],
)
def test_numbers_with_leading_zeros_are_no_inputs(numbers, told, capsys):
    """The label has a usual name, although it is not the last field."""
    rows = [f"{number},{i},b,{i % 2},0.5" for i, number in enumerate(numbers)]
    table = "\n".join(["no,a,who,Outcome,x", *rows])
    config = written({"train.csv": table, "new customers.csv": table, "m.pt": ""})
    arguments = config["study_arguments"]
    assert (arguments["label"], arguments["targets"]) == ("Outcome", "new customers.csv")
    assert arguments["columns"] == [*["no"] * (told is None), "a", "x"]
    for text in (capsys.readouterr().out, Path("trak.yaml").read_text()):
        assert ("leading zeros" in text) == (told is not None)
        assert told is None or told in text


def test_labelled_texts(capsys):
    saved = {f"out/checkpoint-{step}/config.json": CLASSIFIER for step in (4, 12)}
    files = {
        "train.csv": "review,labels\nvery good,1\nbad,0\n",
        "test.csv": "review,labels\nso,0\nas,0\nno,0\ngood,1\n",
    }
    config = written({**saved, **files})
    assert config["study"] == "text_classification"
    assert config["study_arguments"] == {
        "texts": "train.csv",
        "weights": "out/checkpoint-12",
        "label": "labels",
        "text": "{review}",
        "targets": "test.csv",
    }
    assert config["experiments"] == {"asked": {"targets": "all"}}
    assert "check:" not in capsys.readouterr().out


def test_the_longest_of_several_texts_is_used_with_a_comment(capsys):
    files = {"out/config.json": CAUSAL, "train.tsv": "title\tbody\nred\tthe sky is red\n"}
    assert written(files)["study_arguments"]["text"] == "{body}"
    printed = capsys.readouterr().out
    (comment,) = re.findall(r"check: text: (.*)\n", printed)
    assert "fields (title, body); this is the longest field" in comment
    assert f'text: "{{body}}"  # {comment}\n' in Path("trak.yaml").read_text()


@pytest.mark.parametrize(
    "held_out", ["holdout", "hold_out", "hold-out", "HoldOut", "heldout", "held out", "unseen"]
)
@pytest.mark.parametrize("kind", ["images", "rows"])
def test_data_whose_names_do_not_mark_training_data(held_out, kind, capsys):
    """Data to explain is recognized by its name, and the largest of the rest is assumed."""

    def files(name, n):
        if kind == "rows":
            return {f"d/{name}.csv": "a,label\n" + "0.5,1\n" * n}
        return {f"d/{name}/{label}/{i}.png": "." for label in ("x", "y") for i in range(n)}

    names = {held_out: 9, "a": 1, "pictures": 5, "z": 2}
    every = {path: text for name, n in names.items() for path, text in files(name, n).items()}
    arguments = written(every | {"d/m.pt": ""})["study_arguments"]
    ending = ".csv" if kind == "rows" else ""
    data = arguments["table" if kind == "rows" else "images"]
    assert (data, arguments["targets"]) == (f"d/pictures{ending}", f"d/{held_out}{ending}")
    assert f"check: {data} is assumed to be the training data" in capsys.readouterr().out


def test_weights_of_timm_name_their_network(capsys):
    images = {f"train/{name}/1.png": "" for name in ("a", "b")}
    saved = {"out/config.json": '{"architecture": "resnet18"}', "out/model.safetensors": ""}
    config = written({**images, **saved})
    arguments = {"images": "train", "model": "timm/resnet18", "transform": None}
    assert (config["study"], config["study_arguments"]) == ("image_folder", arguments)
    assert config["checkpoints"] == {"model": "out/model.safetensors"}
    assert re.findall(r"check: (\w+)", capsys.readouterr().out) == ["transform"]


@pytest.mark.parametrize(("n", "targets"), [(2000, "all"), (2001, [0, 1, 2])])
def test_up_to_2000_labelled_targets_are_explained(n, targets):
    rows = "".join(f"1.5,{int(i >= 1000)}\n" for i in range(n))
    config = written({"train.csv": f"a,label\n{rows}", "m.pt": ""})
    assert config["experiments"] == {"asked": {"targets": targets}}


IMAGES = "label", "image_classification"


@pytest.mark.parametrize(
    ("table", "label", "output", "more"),
    [
        ("size,price\n3,1.5\n4,1.5\n5,2\n", "price", "regression", {}),
        ("size,price\n3,1\n4,1\n5,2\n", "price", "image_classification", {}),
        # Texts are classes in alphabetical order. Floats are not classes.
        ("a,label\n1.5,dog\n2,cat\n", *IMAGES, {"classes": ["cat", "dog"]}),
        ("a,label\n1.5,1.0\n2,0.0\n", "label", "regression", {}),
        ("a,label\n1.5,True\n2,False\n", *IMAGES, {}),
        ("a,price,id\n1.5,2.5,7\n2,0.1,8\n", "price", "regression", {}),
        ("LABEL,a\n1,0.5\n0,0.1\n", "LABEL", "image_classification", {}),
        # Texts are not inputs. A column with a missing number is still an input.
        ("name,a,label\nx,,0\ny,2,1\n", *IMAGES, {"columns": ["a"]}),
        # A column of which at least half of the cells are numbers is numeric.
        ("name,a,label\nx,1,1\ny,n/a,0\nz,-,0\nz,2,0\n", *IMAGES, {"columns": ["a"]}),
        ("a,b,label\n1,2,1\nn/a,3,0\n4,,1\n", *IMAGES, {}),
        ("a,label\n1,2.5\n2,?\n3,0.5\n", "label", "regression", {}),
        ("a,label\n1,x\n2,\n3,y\n", *IMAGES, {"classes": ["x", "y"]}),
        ("a,b,label\n2024-01-02,1,1\n2024-01-03,2,0\n", *IMAGES, {"columns": ["b"]}),
        # Row numbers of pandas are not inputs.
        (",a,b,label\n0,1,2,1\n1,3,4,0\n", *IMAGES, {"columns": ["a", "b"]}),
    ],
)
def test_labels_and_inputs_of_a_table(table, label, output, more):
    config = written({"train.csv": table, "m.pt": ""})
    assert (config["study"], config["model_output"]) == ("tabular", output)
    n_rows = table.count("\n") - 1
    first = [7, 8] if table.startswith("a,price,id\n") else [*range(min(3, n_rows))]
    targets = "all" if output == "image_classification" else first
    assert config["experiments"] == {"asked": {"targets": targets}}
    classes = config["study_arguments"].get("classes")
    assert repr(classes) == repr(more.get("classes"))
    given = {"table": "train.csv", "label": label, "model": "nets.py:net", "scale": None, **more}
    assert config["study_arguments"] == given


@pytest.mark.parametrize(
    "named",
    [
        {"run0/m_ep1.pt": ("m_ep1", "run0", 1), "run0/m_ep2.pt": ("m_ep2", "run0", 2)},
        {"a/last.pt": ("a_last", "a_last", None), "b/last.pt": ("b_last", "b_last", None)},
        {
            f"{folder}/checkpoints/epoch{at}.pt": (f"{run}_epoch{at}", run, at)
            for folder, run in (("run0", "run0"), ("b 1", "b_1"))
            for at in (1, 2)
        },
        # These folders have no different names, or there are several runs in a folder.
        {"a b/x.pt": ("x_0", "x_0", None), "a-b/x.pt": ("x_1", "x_1", None)},
        {
            f"d/{name}_ep{at}.pt": (f"{name}_ep{at}", run, at)
            for name, run in (("m", "run1"), ("n", "run2"))
            for at in (1, 2)
        },
    ],
)
def test_runs_and_ids_are_named_after_folders_that_differ(named):
    table = checkpoint_table(written({**ROWS, **dict.fromkeys(named, "")})["checkpoints"], None)
    assert {c.path: (name, c.run, c.at) for name, c in table.items()} == named


def test_each_checkpoint_has_a_different_key():
    names = ("m-1.pt", "m.1.pt", "m_1.pt", "m_1_0.pt")
    config = written({**ROWS, **dict.fromkeys(names, "")})
    assert sorted(config["checkpoints"].values()) == sorted(names)


def test_images_in_the_current_folder_are_refused(here, monkeypatch):
    write({f"mine/{name}/1.png": "" for name in ("a", "b")} | {"mine/m.pt": ""})
    monkeypatch.chdir("mine")
    with refused("command.results_here", here / "mine", "init mine"):
        init([])
    monkeypatch.chdir("..")
    init(["mine"])
    config = yaml.safe_load(Path("trak.yaml").read_text())
    assert config["study_arguments"]["images"] == "mine"
    monkeypatch.chdir("mine")
    with refused("config.results_in_images", "images", "results"):
        own = {"results": "results", "study_arguments": {"images": ".", "model": "resnet18"}}
        with_ready_study({**config, **own})


def test_a_study_is_found_in_subfolders():
    files = {"runs/first/out/checkpoint-5/config.json": CAUSAL, "data/train.jsonl": TEXTS}
    config = written({**files, "data/asked.jsonl": TEXTS, "runs/venv/pyvenv.cfg": ""})
    assert config["checkpoints"] == {"out": "runs/first/out"}
    assert config["study_arguments"] == {"texts": "data/train.jsonl"}
    rmtree("runs")
    Path("trak.yaml").unlink()
    images = [f"data/{split}/{name}/1.png" for split in ("train", "val") for name in ("x", "y")]
    config = written({**dict.fromkeys(images, ""), "models/old/run.pt": ""})
    assert config["study_arguments"]["images"] == "data/train"


OUT = {"out/config.json": CAUSAL}
DEEP = {"a/b/c/d/e/run.pt": "", "results/train.csv": "", ".git/run.pt": "", "table.csv": "a\n1\n"}
REFUSED = [
    ({}, ["nowhere"], "no_folder", ["nowhere"]),
    ({}, [], "no_study", ["none of them"]),
    (
        {"train/a/1.png": "", "train/b/1.png": ""},
        [],
        "no_study",
        ["4 levels of subfolders, train. Found folders of images: train"],
    ),
    # Folders that are too deep, hidden, or of results.
    (DEEP, [], "no_study", ["subfolders, a, a/b, a/b/c, a/b/c/d. Found rows: table.csv"]),
    ({**OUT, "test.jsonl": TEXTS}, [], "no_training_data", ["test.jsonl"]),
    (
        {"train.jsonl": TEXTS, "out/config.json": json.dumps({"architectures": ["BertModel"]})},
        [],
        "weights_kind",
        ["BertModel", "out"],
    ),
    (
        {"train.jsonl": TEXTS, "out/config.json": "{"},
        [],
        "weights_config",
        ["out/config.json", re.compile(r"Expecting.*[)]")],
    ),
    *((OUT, ["--config", name], "config_name", [name]) for name in ("none/trak.yaml", "trak.txt")),
]


@pytest.mark.parametrize(("files", "words", "code", "values"), REFUSED)
def test_what_makes_no_config_is_refused(files, words, code, values):
    write(files)
    with refused(f"command.{code}", *values):
        init(words)
    assert not Path("trak.yaml").exists()


def test_weights_in_the_current_folder_are_refused_unless_they_are_a_trainers(here, monkeypatch):
    write({"out/config.json": CAUSAL, "out/train.jsonl": TEXTS})
    monkeypatch.chdir("out")
    with refused("command.results_here", here / "out", "init out"):
        init([])
    write({"checkpoint-4/config.json": CAUSAL})  # a Trainer's
    init([])
    assert yaml.safe_load(Path("trak.yaml").read_text())["checkpoints"] == {"run": "."}


def test_ids_with_a_colon_stay_text_in_yaml():
    config = written({**OUT, "train.jsonl": '{"text": "a", "id": "12: no"}\n'})
    assert config["experiments"]["asked"]["targets"] == ["12: no"]


def listed(files, n_classes=2):
    """Return the checkpoints of the config for files and images, and the report on the others."""
    write({f"train/class{n}/1.png": "" for n in range(n_classes)} | files)
    text, report = config_for(Path())
    checkpoints = yaml.safe_load(text)["checkpoints"].values()
    return [*checkpoints], [line for line in report if line.startswith("left out")]


def net(*sizes):
    pairs = enumerate(pairwise(sizes))
    return {
        f"{n}.{key}": torch.zeros(shape)
        for n, (i, o) in pairs
        for key, shape in (("weight", (o, i)), ("bias", (o,)))
    }


NET = net(3, 4, 2)
IN = torch.nn.Linear(3, 2)
ADAM = torch.optim.Adam(IN.parameters())
IN(torch.ones(3)).sum().backward()
ADAM.step()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "a.pth.tar", "a.bin", "A.PTH"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model_state_dict", "module."])
def test_weights_of_every_ending_and_wrapper_are_listed(name, wrapper):
    if wrapper == "module.":
        contents = {f"module.{key}": tensor for key, tensor in NET.items()}
    elif wrapper and not name.endswith("safetensors"):
        contents = {wrapper: NET, "epoch": 3, "optimizer": ADAM.state_dict()}
    else:
        contents = NET
    assert listed({name: contents, "other.pt": NET}) == ([*sorted([name, "other.pt"])], [])


def test_files_that_do_not_load_are_left_out_with_the_reason():
    torch.save(ADAM.state_dict(), "optimizer.pt")
    Path("cut.pt").write_bytes(b"PK\x03\x04 and no more")
    checkpoints, lines = listed({"run.pt": NET})
    assert checkpoints == ["run.pt"]
    for line, name, told in zip(
        lines, ("cut.pt", "optimizer.pt"), ("was cut off", "state, param_groups"), strict=True
    ):
        assert line.startswith(f"left out: {name}: ")
        assert told in line


@pytest.mark.parametrize(
    ("others", "kept"),
    [
        ({"a.pt": net(3, 4, 4, 2)}, {"r1.pt": NET, "r2.pth.tar": NET}),
        ({"z.pt": net(3, 5, 2)}, {"run.pt": NET}),
        ({"b.pt": net(3, 9, 9), "z.pt": net(3, 5, 2)}, {"a1.pt": NET}),
    ],
)
def test_files_of_one_network_are_listed(others, kept):
    checkpoints, lines = listed(others | kept)
    assert checkpoints == [*kept]
    first = next(iter(kept))
    assert [line.split(", ")[0] for line in lines] == [
        f"left out: {name}: another network than {first}" for name in others
    ]


@pytest.mark.parametrize(
    ("names", "times"),
    [
        (["epoch=0-step=50.ckpt", "epoch=1-step=100.ckpt"], [50, 100]),
        (["epoch=3-val_loss=0.25.ckpt", "epoch=12-val_loss=0.3.ckpt"], [12, 3]),
        (["net_ep1_acc0.9.pth.tar", "net_ep2_acc0.95.pth.tar"], [1, 2]),
        (["m_step100.bin", "m_step20.bin"], [100, 20]),
    ],
)
def test_files_with_times_are_of_one_run(names, times):
    checkpoints, told = listed(dict.fromkeys([*names, "other_best.pt"], NET))
    assert [c["at"] for c in checkpoints if isinstance(c, dict)] == times
    assert [c for c in checkpoints if isinstance(c, str)] == ["other_best.pt"]
    assert {c["run"] for c in checkpoints if isinstance(c, dict)} == {"run1"}
    assert told == []
