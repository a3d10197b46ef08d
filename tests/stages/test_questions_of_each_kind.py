"""Questions to runs of adapters, pairs, tokens, user-defined outputs, tables and pictures."""

import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import linear_study
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from few_words import tokenizer, write
from pages import blocks
from PIL import Image
from pipeline import read_scores, run_config, token_scores
from refused import refused
from report_page import Page
from reported import data_of

import trak_core
from trak_core import Attributor
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.command.ask import _in_words
from trak_core.command.main import main
from trak_core.queries.finished_run import FinishedRun
from trak_core.queries.question_and_answer import Answer, Asked, as_of_class
from trak_core.study.study import Study

peft = pytest.importorskip("peft", reason="with the extra `test`")
models, texts = pytest.importorskip("models"), pytest.importorskip("texts")

ROWS = [
    {"id": f"t{i}", "text": text}
    for i, text in enumerate(["sky is blue", "the sun", "red sky is", "the grass is green"])
]
QUESTION = [{"id": "q", "text": "the sky is red"}]
OWN = f"""{linear_study.STUDY}

def encode(row):
    return x[row], y[row]

def distance(returned, label):
    return -((returned[0] - label) ** 2)
"""


def of_texts(folder, **more):
    texts.gpt2().save_pretrained(folder / "out")
    tokenizer().save_pretrained(folder / "out")
    write(folder / "train.jsonl", ROWS)
    write(folder / "asked.jsonl", QUESTION)
    config = {"study": "language_model", "study_arguments": {"texts": "train.jsonl"}}
    return config | {"checkpoints": {"c0": "out"}} | more


def adapter(folder):
    config = of_texts(folder, checkpoints={"c0": "lora"})
    base = texts.gpt2().from_pretrained(folder / "out")
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    made = peft.get_peft_model(base, peft.LoraConfig(**settings, task_type="CAUSAL_LM"))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # which begin as 0
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(folder / "lora")
    return config


def tokens(folder):
    scoring = {"normalize": True, "loss_weight_power": 0.5}
    return of_texts(folder, model_output="token_log_odds", scoring=scoring)


def pairs(folder):
    sizes = {"n_train": 12, "n_targets": 3}
    study = models.STUDY.format(name="clip", dtype="float32", **sizes)
    (folder / "pairs.py").write_text(study)
    torch.save(models.clip().state_dict(), folder / "c0.pt")
    write(folder / "asked.jsonl", [{"id": "q", "number": 13}])
    return {"study": "pairs.py", "model_output": "clip", "checkpoints": {"c0": "c0.pt"}}


def own(folder):
    (folder / "own.py").write_text(OWN)
    torch.save(torch.nn.Linear(3, 1).state_dict(), folder / "c0.pt")
    write(folder / "asked.jsonl", [{"id": "q", "row": 31}])
    words = {"function": "own.py:distance", "name": "minus the distance", "meaning": "the nearer"}
    return {"study": "own.py", "model_output": words, "checkpoints": {"c0": "c0.pt"}}


NETS = """
from torch import nn

def net(n=1):
    return nn.Sequential(nn.Flatten(), nn.Linear({n_inputs}, n))
"""


def ready_made(folder, study, n_inputs, n_outputs, **arguments):
    """A ready-made study of a linear network, in a module of the study's own."""
    (folder / f"{study}_net.py").write_text(NETS.format(n_inputs=n_inputs))
    weights = {"1.weight": torch.randn(n_outputs, n_inputs), "1.bias": torch.zeros(n_outputs)}
    torch.save(weights, folder / "c0.pt")
    arguments["model"] = f"{study}_net.py:net"
    return {"study": study, "study_arguments": arguments, "checkpoints": {"c0": "c0.pt"}}


def table(folder):
    rows = [{"id": f"r{i}", "a": i / 10, "b": i % 7, "price": i + 1 / 3} for i in range(20)]
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    write(folder / "asked.jsonl", [{"id": "q", "a": 0.3, "b": 2, "price": 4.5}])
    made = ready_made(folder, "tabular", 2, 1, table="train.csv", label="price")
    return made | {"model_output": "regression"}


def pictures(folder):
    pixels = np.random.default_rng(0).integers(0, 256, (13, 4, 4, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        path = folder / (f"train/{'cat' if i % 2 else 'dog'}/{i}.png" if i < 12 else "new.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    write(folder / "asked.jsonl", [{"id": "new", "path": "new.png", "label": "cat"}])
    return ready_made(folder, "image_folder", 48, 2, images="train")


SAID = {
    adapter: r"the joint log-odds of the tokens that count: \S+; tokens 3, right \d",
    tokens: r"the sum of the log-odds of the tokens that count: \S+; tokens 3, right \d",
    pairs: r"the log-odds of the pair among others, summed over both \w+: \S+; told apart [01]",
    own: r"minus the distance: \S+",
    table: r"the prediction: \S+; label 4.5",
    pictures: r"the log-odds of the label: \S+; label cat, predicted (cat|dog)",
}


def made_by(kind, folder, projection):
    """Return the results of a study of this kind."""
    torch.manual_seed(0)
    asked = {"experiments": {"asked": {"data": "asked.jsonl"}}, "projection": projection}
    (folder / "mine.yaml").write_text(yaml.safe_dump(kind(folder) | asked))
    return run_config(folder / "mine.yaml")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', by peft
@pytest.mark.parametrize(
    ("kind", "projection"),
    [*((kind, {"proj_dim": 16}) for kind in SAID), (pairs, "exact")],
    ids=[*(kind.__name__ for kind in SAID), "exact pairs"],
)
def test_scores_equal_those_of_the_workflow(kind, projection, here, capsys):
    results = made_by(kind, here, projection)
    expected = read_scores(results / "scores/asked.h5").iloc[:, 0]
    assert (expected != 0).all()
    capsys.readouterr()
    main(["ask", "mine.yaml", "--file", "asked.jsonl", "--csv", "out.csv", "--top", "20"])
    out = capsys.readouterr().out
    assert re.search(rf"^{SAID[kind]}$", out, re.M), out
    found = pd.read_csv("out.csv").set_index("train_id")["score"].loc[expected.index]
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # as the table rounds
    run = trak_core.open("results")
    line = run.asked((here / "asked.jsonl").read_text())
    answer = run.ask(line)
    of_study = Attributor.of_study(run.study, run.run.specs.config).fit()
    for scores in (answer.scores, of_study.score([line.sample]).frame[0]):
        difference = np.abs(scores.to_numpy() - expected.to_numpy()).max()
        assert difference <= 1e-6 * np.abs(expected).max()
    targets = pd.read_hdf(results / "scores/asked.h5", "targets")
    np.testing.assert_allclose(answer.target["output"], targets["output"][0], rtol=1e-5)
    assert answer.tokens is None
    if kind in (adapter, tokens):
        check_tokens(results, line, capsys)
    elif projection == "exact":
        with refused("attribution.no_features"):
            trak_core.open("results").ask(line, tokens=True)


def check_tokens(results, line, capsys):
    """Scores by token equal those of the workflow, and are shown with --tokens only."""
    specs = FinishedRun.of_folder(results).specs
    study, checkpoints = Path(specs.config["study"]), {"c0": Path(specs.checkpoints["c0"].path)}
    given = {"experiment": "asked", "question": Path("asked.jsonl")}
    token_scores(results, study, checkpoints, specs.scores("asked"), **given)
    expected = pd.read_hdf(results / "token_scores/asked.h5", "tokens")
    answer = trak_core.open("results").ask(line, tokens=True)
    keys = ["train_id", "side", "token"]
    found = answer.tokens.set_index(keys)["score"]
    expected = expected.set_index(keys)["score"]
    assert set(found.index) == set(expected.index)
    largest = answer.scores.abs().max()
    np.testing.assert_allclose(found.loc[expected.index], expected, rtol=0, atol=1e-5 * largest)
    assert "".join(answer.tokens_of()["text"]) == QUESTION[0]["text"]
    (row,) = [row for row in ROWS if row["id"] == answer.top["train_id"][0]]
    assert "".join(answer.tokens_of(row["id"])["text"]) == row["text"]
    capsys.readouterr()
    words = ["ask", "mine.yaml", "--file", "asked.jsonl", "--html", "out.html"]
    main(words)
    assert "most by" not in capsys.readouterr().out
    assert "The colour of a token" not in Path("out.html").read_text()
    main([*words, "--tokens"])
    own = answer.tokens_of()
    most = own["text"][own["score"].abs().idxmax()].strip()
    assert f'\nmost by "{most}"' in capsys.readouterr().out
    page = Path("out.html").read_text()
    assert "The colour of a token" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["targets"][0]["tokens"] == own["text"].tolist()


def test_classes_of_pictures_are_called_by_their_names(here, capsys):
    """As docs/how-to/questions.md asks for another label: the answer of a line with that label."""
    made_by(pictures, here, {"proj_dim": 16})
    run = trak_core.open("results")
    with refused("attribution.no_tokens"):
        run.tokens(run.score([run.sample("new", "asked")]))
    called = dict(blocks("docs/how-to/questions.md", "Why did it say dog?"))["console"]
    Path("images.yaml").write_bytes(Path("mine.yaml").read_bytes())
    asked = ["ask", "images.yaml", "--file", "asked.jsonl", "--top", "1", "--html", "out.html"]
    capsys.readouterr()
    main([*asked, "--csv", "out.csv", "--tokens"])
    out, err = capsys.readouterr()
    assert err.count("Notice: answers will not contain scores by token") == 1
    rows = pd.read_csv("out.csv")
    assert rows["label"].tolist() == [i.partition("/")[0] for i in rows["train_id"]]
    assert {*rows["prediction"]} <= {"cat", "dog"}
    shown = re.findall(r"  train (\w+)/\d+.png  label (\w+)\n(?!    )", out)
    assert len(shown) == 2
    assert all(folder == label for folder, label in shown)
    page = Path("out.html").read_text()
    assert "data:image/png" in page
    (target,) = data_of(Page(page))["targets"]
    assert target["words"].startswith("label cat, predicted")
    assert ("--label CLASS" in page) == (target["words"] == "label cat, predicted dog")
    assert target["sample"][-1] == ""
    assert "Study: image_folder<" in page

    main([*shlex.split(called)[2:], "--html", "dog.html"])
    by_label = capsys.readouterr().out
    own_label = "; its own label cat"
    said = rf"^the log-odds of the label: \S+; label dog, predicted (cat|dog){own_label}$"
    assert re.search(said, by_label, re.M)
    page = Path("dog.html").read_text()
    assert "own_label cat" in page
    assert "are suspects" not in page
    write(here / "dog.jsonl", [{"id": "new", "path": "new.png", "label": "dog"}])
    main(["ask", "images.yaml", "--file", "dog.jsonl"])
    assert capsys.readouterr().out == by_label.replace(own_label, "")
    with pytest.raises(SystemExit):
        main(["ask", "images.yaml", "--target", "new", "--label", "fox"])
    assert "A label must be one of cat, dog. Found fox." in capsys.readouterr().err


def test_another_label_is_a_class():
    """Samples that get another label: library/test_study.py. This study names no classes."""
    study = Study(Path("own.py"), ModuleType("own"))
    text = Asked(7, {"input_ids": torch.ones(2), "labels": torch.tensor(1)})
    other = as_of_class(text, "0", study, "text_classification")
    assert (other.own_label, other.sample["labels"].item()) == (1, 0)
    with refused("queries.label", "the number of a class", "fox"):
        as_of_class(text, "fox", study, "text_classification")
    with refused("queries.label", "regression"):
        as_of_class(text, "0", study, "regression")


def test_control_characters_are_not_printed(monkeypatch):
    """In names of classes, ids, columns and texts. A tab in a token is printed as a space."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    bad = "c\x1b[31mat\t\x9b\x07\N{RIGHT-TO-LEFT OVERRIDE}"
    row = {"train_id": bad, "score": 1.0, "label": 0, "prediction": 0, "output": 1.0}
    known = pd.DataFrame([
        row | {"output_sd": 0.0, "gap": "", "who": bad, "described_text": f"{bad}, a text"}
    ])
    tab = {"train_id": bad, "token": 0, "text": "a\t" * 9, "score": 1.0}
    cut = pd.DataFrame([tab | {"side": side} for side in ("train", "target")])
    target = {"id": bad, "label": 0, "prediction": 0, "output": 1.0, "output_sd": 0.0}
    scores = pd.Series([1.0], [bad])
    parts = known[["train_id", "score"]], known.set_index("train_id").drop(columns="score")
    asked = Asked(bad, None), target, bad, scores, *parts, "text_classification", [bad]
    printed = _in_words(Answer(*asked, cut))
    plain = re.sub(r"\x1b\[(1;3[12]|0)m", "", printed)  # colours
    assert all(character.isprintable() for character in plain.replace("\n", ""))
    assert plain.count("c[31mat") == 8
    assert plain.count("a " * 9) == 2
    assert "gap" not in plain  # An empty cell is left out.


def test_texts_that_the_model_does_not_take_and_a_study_of_another_version(
    tmp_path, monkeypatch, capsys
):
    """Each is reported in a sentence, and the next line is answered."""
    config = of_texts(tmp_path) | {"projection": {"proj_dim": 128}}
    config |= {"experiments": {"asked": {"data": "asked.jsonl"}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    results = run_config(tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    long = " ".join(["sky"] * 500)
    write(tmp_path / "odd.jsonl", [{"text": long}, {"text": ""}, {"text": "sky"}, *QUESTION])
    run = trak_core.open("results")

    def too_long(*_):
        raise AssertionError("more than 30 positions")

    with monkeypatch.context() as patch:
        patch.setattr(LoadedModel, "few", too_long)
        with refused("queries.not_taken", "AssertionError", "30 positions"):
            run.ask("the sky")
    with pytest.raises(SystemExit):
        main(["ask", "mine.yaml", "--file", "odd.jsonl"])
    told = capsys.readouterr()
    assert told.out.startswith("q: the sky is red\n") or "\nq: the sky is red\n" in told.out
    errors = [line for line in told.err.splitlines() if line.startswith("Error: ")]
    assert [error[:14] for error in errors] == [f"Error: line {n}:" for n in (1, 2, 3)]
    (study,) = results.glob("*_study_*.py")
    study.rename(study.with_name("language_model_study_00000000.py"))
    with refused("queries.not_finished", study.name):
        trak_core.open("results").ask("the sky")
