"""A config that names a ready-made study: no Python. Its samples and model: test_studies.py."""

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pandas as pd
import patience
import pytest
import texts
import yaml
from few_words import WORDS, tokenizer, write
from pages import blocks, run_code
from pipeline import run_config
from refused import refused
from workspace import REPOSITORY, Workspace

import trak_core
from trak_core.command.main import main
from trak_core.config.bind_study_arguments import READY_MADE, with_ready_study
from trak_core.runtime.files import data_digests
from trak_core.study.study import Study

ROWS = [{"id": i, "text": text} for i, text in enumerate(["sky is blue", "the sun", "red sky is"])]
(SHOWN,) = (text for info, text in blocks("README.md") if info == "yaml")
(READ,) = (text for info, text in blocks("README.md", "Read the scores") if info == "python")
CONFIG = yaml.safe_load(SHOWN) | {"projection": {"proj_dim": 16}}


def written_study(study, results):
    (file,) = study.path(results).glob("*_study_*.py")
    return file


@pytest.fixture
def study(here):
    study = Workspace(here, deepcopy(CONFIG))
    texts.gpt2().save_pretrained(study.path("out"))
    tokenizer().save_pretrained(study.path("out"))
    write(study.path("train.jsonl"), ROWS)
    write(study.path("asked.jsonl"), [{"text": "the sky is red"}])
    return study


def check_that_it_can_be_asked(study, scores, capsys):
    """As docs/how-to/questions.md does it: the same scores by a command and from a notebook."""
    study.path("texts.yaml").write_text(yaml.safe_dump(study.config))
    before = {path: path.stat().st_mtime_ns for path in study.path("results-texts").rglob("*")}
    page = "docs/how-to/questions.md"
    called = dict(blocks(page, "Ask at once: `trak ask`"))["console"]
    capsys.readouterr()
    main(shlex.split(called)[2:])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "0: the sky is red"
    assert all(f"train {i} " in out for i in scores.index)
    answers = pd.read_csv("answers.csv").set_index("train_id")
    np.testing.assert_allclose(answers["score"], scores.loc[answers.index], rtol=1e-4)
    assert "the sky is red" in study.path("answers.html").read_text()
    assert "the sky is red" not in run_code(dict(blocks(page, "Ask from a notebook"))["python"])
    answer = trak_core.open("results-texts").ask({"text": "the sky is red"})
    np.testing.assert_allclose(answer.scores, scores, rtol=0, atol=1e-6 * scores.abs().max())
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_texts_and_weights_are_a_study(study, capsys):
    page = dict(blocks("docs/how-to/ready-made.md"))
    assert yaml.safe_load(SHOWN) == yaml.safe_load(page["yaml texts.yaml"])
    study.run("results-texts/scores/asked.h5", "results-texts/answers/asked.h5")
    assert len(run_code(READ).splitlines()) == 4  # the three texts, and a line above
    scores = pd.read_hdf(study.path("results-texts/scores/asked.h5"), "scores")
    described = pd.read_hdf(study.path("results-texts/answers/asked.h5"), "train").set_index("id")[
        "text"
    ]
    assert described.to_dict() == {row["id"]: row["text"] for row in ROWS}
    assert study.would_run() == {}
    check_that_it_can_be_asked(study, scores[0], capsys)

    # An edited text is never given stale scores; a new question costs itself.
    write(study.path("asked.jsonl"), [{"text": "the sun"}])
    assert study.would_run() == {"compute_features": 1, "compute_scores": 1, "average_scores": 1}
    write(study.path("train.jsonl"), ROWS[:2])
    assert study.would_run()["compute_features"] == 2


# Root may write anywhere, unless it gives that up: CAP_DAC_OVERRIDE.
WITHOUT_RIGHT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)\n"
WITHOUT_RIGHT += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


@pytest.mark.skipif(sys.platform != "linux", reason="root gives up a right as Linux has it")
def test_a_colleague_s_results_are_asked_as_they_are(study):
    """They may only be read: what is there is planned from, and what must be made is refused."""
    study.run("results-texts/scores/asked.h5", "results-texts/answers/asked.h5")
    shutil.rmtree(study.path(".snakemake"))  # as in another folder
    # As of an earlier version, and of a start elsewhere: there is something to write.
    for record in study.path("results-texts").glob("*.json"):
        if record.name != "config.json":
            record.unlink()
    call = ["-m", "snakemake", "scores", "--cores", "1", "--configfile", "study.yaml"]
    call += ["--snakefile", study.snakefile]
    ask = "import trak_core; results = trak_core.open('results-texts')\n"
    ask += "print(len(results.ask({'text': 'the sun'}).scores), 'scores')"
    trak = ["-m", "trak_core.command.main", "ask"]
    write(study.path("also.jsonl"), [{"text": "the sun"}])
    new = ["--config", 'experiments={"new": {"data": "also.jsonl"}}']
    other = "study_arguments={texts: train.jsonl, max_tokens: 2}"
    denied = "Found Permission denied at results-texts"
    calls = [
        ([*call, "-n"], 0, "Nothing to be done"),
        (call, 0, "Nothing to be done"),
        ([*trak, "study.yaml", "--file", "asked.jsonl"], 0, "0: the sky is red"),
        (["-c", ask], 0, "3 scores"),
        ([*call, "-n", *new], 0, "new"),
        ([*call, *new], 1, f"{denied}. Make the"),
        ([*call, "-n", "--config", other], 1, f"{denied}/language_model_study_"),
    ]
    results = study.path("results-texts")
    folders = [results, *(path for path in results.rglob("*") if path.is_dir())]
    before = {path: path.stat().st_mtime_ns for path in results.rglob("*")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    for path in folders:
        path.chmod(0o555)
    try:
        for arguments, status, said in calls:
            done = patience.run([sys.executable, "-c", WITHOUT_RIGHT, *arguments], 60, **pipes)
            assert (done.returncode, said in done.stdout) == (status, True), done.stdout
            assert "Traceback" not in done.stdout
    finally:
        for path in folders:
            path.chmod(0o755)
    assert {path: path.stat().st_mtime_ns for path in results.rglob("*")} == before


def test_init_writes_the_page_s_config_which_is_the_one_that_is_run_above(study, capsys):
    page = dict(blocks("docs/how-to/ready-made.md", "Begin with a folder"))
    called, *printed = page["console"].splitlines()
    main(shlex.split(called)[2:])
    assert capsys.readouterr().out.splitlines() == printed
    text = study.path("first.yaml").read_text()
    named = {"checkpoints": {"run": "out"}, "results": "results-texts"}
    assert yaml.safe_load(text) | named == yaml.safe_load(SHOWN)


def test_each_start_shows_samples_as_read_and_asked_ones_in_another_format(study, capsys):
    """A dry run does not hide what is printed. What is said in which case: test_as_read.py."""
    rows = [{"prompt": "asked ", "text": f"{a} {b} said"} for a in WORDS[:3] for b in WORDS[:4]]
    write(study.path("train.jsonl"), rows)
    trained = "The first training sample, 0, as the model reads it: 'asked', then the text "
    told = (
        "0, as the model reads it: 'the sky is red'\n"
        "Notice: training samples begin with 'asked', but this sample does not."
    )
    for arguments in (["scores", "-n"], ["scores"]):
        status, output = study.snakemake(*arguments)
        assert (status, output.count(trained), output.count(told)) == (0, 1, 1), output
    study.path("texts.yaml").write_text(yaml.safe_dump(study.config))
    main(["ask", "texts.yaml", "--file", "asked.jsonl"])
    assert told in capsys.readouterr().err


def test_what_a_config_may_not_say(study):
    assert with_ready_study({"study": "mine.py"}) == {"study": "mine.py"}
    with refused("config.study", "language_modl", ", ".join(READY_MADE)):
        with_ready_study({"study": "language_modl", "study_arguments": {}})
    with refused("config.study", "tabular and study_arguments None"):
        with_ready_study({"study": "tabular"})
    for wrong, named in (
        ({"text": "train.jsonl"}, "no texts"),
        ({"texts": "train.jsonl", "txt": 3}, "unknown key txt"),
        ({"texts": "train.jsonl", "max_tokens": "64"}, "max_tokens: 64 (it must be an integer)"),
    ):
        with refused("config.study_arguments", re.compile(re.escape(named))):
            with_ready_study({"study": "language_model", "study_arguments": wrong})
    with refused("config.weights", "null"):
        with_ready_study({"study": "language_model", "study_arguments": {"texts": "train.jsonl"}})


def test_code_and_data_of_arguments_are_watched(study):
    study.path("nets.py").write_text("import layers\n\ndef net(n):\n    return layers.made(n)\n")
    study.path("layers.py").write_text("from torch import nn\n\nmade = nn.Linear\n")
    study.path("images/a/b").mkdir(parents=True)
    arguments = {"images": "images", "model": "nets.py:net"}
    with refused("config.study_arguments", "no file in images"):
        with_ready_study({"study": "image_folder", "study_arguments": arguments})
    study.path("images/a/b/1.png").touch()
    config = with_ready_study({"study": "image_folder", "study_arguments": arguments})
    assert config["data_files"] == ["images", "nets.py", "layers.py"]
    assert config["model_output"] == "image_classification"
    assert "class_names = study.class_names" in written_study(study, "results").read_text()


def test_images_that_a_table_names_are_watched(study):
    study.path("nets.py").write_text("def net(n):\n    pass\n")
    rows = [{"path": f"a[1]/{i}.png", "label": 0} for i in range(3)] + [{"path": "b.jpg"}]
    study.path("a[1]").mkdir()
    for path in ("a[1]/0.png", "b.jpg", "c.png"):
        study.path(path).write_bytes(b"image")
    for name in ("train.jsonl", "train.csv", "train.tsv"):
        if name.endswith("jsonl"):
            write(study.path(name), rows)
        else:
            pd.DataFrame(rows).to_csv(name, sep="," if name.endswith("csv") else "\t", index=False)
        arguments = {"images": name, "model": "nets.py:net"}
        config = with_ready_study({"study": "image_folder", "study_arguments": arguments})
        assert config["data_files"] == [name, "a[[]1]/*.png", "./*.jpg", "nets.py"]
    watched = data_digests(config["data_files"], study.path("results/record.json"))
    assert {"a[1]/0.png", "b.jpg"} == set(watched) - {"train.tsv", "nets.py"}


def test_a_study_of_one_s_own_takes_arguments(study):
    study.path("sizes.py").write_text("SHIFT = 0.5\n")
    study.path("mine.py").write_text(
        "import torch\nfrom sizes import SHIFT\n\n"
        "def make_model(width, *, bias=True):\n    return torch.nn.Linear(width, 1, bias=bias)\n\n"
        "def train_data(width, n=4):\n"
        "    return [(torch.full((width,), i + SHIFT), 1.0) for i in range(n)]\n\n"
        "def target_data(width):\n    return train_data(width, 2)\n\n"
        "def describe(sample, digits=1):\n    return f'{sample[0][0].item():.{digits}f}'\n\n"
        "def train(seed, data=None, width=0):\n    yield 1, make_model(width)\n"
    )
    given = {"study": "mine.py", "study_arguments": {"width": 3, "bias": False, "digits": 2}}
    config = with_ready_study(given)
    assert config["data_files"] == ["mine.py", "sizes.py"]
    assert config["study"] == str(written_study(study, "results").relative_to(study.folder))
    made = Study.load(Path(config["study"]))
    assert {k: v.shape for k, v in made.make_model().state_dict().items()} == {"weight": (1, 3)}
    split = made.split("train", None)
    assert len(split.ids) == 4
    assert made.describe(0, split.samples[0]) == "0.50"
    assert [name for name in ("encode", "draw", "train_ids") if made.has(name)] == []
    assert inspect.isgeneratorfunction(inspect.unwrap(made.function("train")))
    assert with_ready_study({**given, "study_arguments": {"width": 4}})["study"] != config["study"]
    needed = (f"no width, which {name}() needs" for name in ("make_model", "train_data"))
    for wrong, named in (
        ({}, "; ".join([*needed, "no width, which target_data() needs"])),
        ({"width": 3, "widht": 4}, "unknown key widht"),
        ({"width": float("nan")}, "width: nan"),
        ({"width": 3, "sample": 1, "seed": 0}, "unknown key sample; unknown key seed"),
    ):
        with refused("config.study_keywords", "mine.py", named):
            with_ready_study({**given, "study_arguments": wrong})
    with refused("provenance.study_file", "gone.py: the study's Python file must exist"):
        with_ready_study({**given, "study": "gone.py"})
    with refused("study.failed", "gone.py: the study's file must end without an error"):
        Study.load(Path("gone.py"))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers'
@pytest.mark.parametrize("name", ["images", "tables", "texts", "labelled_texts"])
def test_an_example_runs_and_mostly_finds_the_own_class(name, here):
    shutil.copytree(REPOSITORY / "examples", "examples")
    shutil.copy(f"examples/{name}.yaml", "study.yaml")
    Path("ready-made").mkdir()
    make = "make_texts" if name.endswith("texts") else "make"
    Study.load(Path("examples/ready_made.py")).function(make)(Path("ready-made"))
    with_ready_study(yaml.safe_load(Path("study.yaml").read_text()))  # as a start does
    results = run_config(Path("study.yaml"))
    top, targets = (
        pd.read_hdf(results / "scores/some.h5", key) for key in ("top_influences", "targets")
    )
    first = top[(top["rank"] == 1) & (top["score"] > 0)].set_index("target_id")
    if name == "texts":  # whose labels are numbers of tokens: weather-3 is of the weather
        found, own = first["train_id"].str.split("-").str[0], first.index.str.split("-").str[0]
    else:
        found, own = first["train_label"], targets.set_index("id")["label"].loc[first.index]
    assert (found == own).sum() > len(targets) / 2


def test_whatever_a_study_of_one_s_own_has_is_handed_on(here):
    """Functions that are imported or assigned too, and keywords by any name but train's own."""
    Path("shown.py").write_text("def draw(axes, sample):\n    pass\n\nwords = list\n")
    Path("own.py").write_text(
        "import shown\nimport json as helper\nfrom shown import draw, words as token_texts\n\n"
        "describe = str\nencode, other = dict, None\ntrain_columns: object = dict\n"
        "\n\nclass make_model:\n    pass\n\n\n"
        "def train_data(data, *, seed):\n    return [data] * seed\n\n\n"
        "def target_data(*, data=''):\n    return [data]\n\n\n"
        "def train(seed, data=None):\n    pass\n"
    )
    given = {"study": "own.py", "study_arguments": {"data": "scans", "seed": 2}}
    made = Study.load(Path(with_ready_study(given)["study"]))
    imported = ("draw", "token_texts", "describe", "encode", "train_columns", "make_model")
    for name in imported:
        assert made.function(name) is getattr(made.module.own, name)
    assert made.split("train", None).samples == ["scans", "scans"]
    assert made.function("target_data")() == ["scans"]
    assert inspect.signature(made.function("train")) == inspect.signature(made.module.own.train)
    with refused("config.study_keywords", "own.py", "no seed, which train_data() needs"):
        with_ready_study({**given, "study_arguments": {"data": "scans"}})

    Path("own.py").write_text("def token_texts(sample, end='.'):\n    return [str(sample) + end]\n")
    ended = {"study": "own.py", "study_arguments": {"end": "!"}}
    texts = Study.load(Path(with_ready_study(ended)["study"]))
    assert texts.token_texts(0, "a", 1) == ["a!"]
