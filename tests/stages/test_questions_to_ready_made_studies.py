"""Ready-made studies of images and of tables take an experiment's lines, by `trak ask` too."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from few_words import write
from pages import blocks
from PIL import Image
from pipeline import read_scores, run_config
from refused import refused
from report_page import Page
from reported import data_of

import trak_core
from trak_core.command.main import main
from trak_core.queries.question_and_answer import Asked, as_of_class
from trak_core.study.study import Study

# It names no classes.
STUDY = Study(Path("own.py"), ModuleType("own"))
NETS = """
from torch import nn

def net(n=1):
    return nn.Sequential(nn.Flatten(), nn.Linear({0}, n))
"""


def make_table(folder):
    """Rows of two numbers, whose sum was learned."""
    rows = [{"id": f"r{i}", "a": i / 10, "b": i % 7, "price": i + 1 / 3} for i in range(20)]
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    write(folder / "asked.jsonl", [{"a": 0.3, "b": 2, "price": 4.5}])
    arguments = {"table": "train.csv", "label": "price"}
    return {"study": "tabular", "model_output": "regression"}, arguments, 2, 1


def make_images(folder):
    """Small pictures of two kinds; one more to ask about."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 4, 4, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        path = folder / (f"train/{'cat' if i % 2 else 'dog'}/{i}.png" if i < 12 else "new.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    write(folder / "asked.jsonl", [{"path": "new.png", "label": "cat", "id": "new"}])
    return {"study": "image_folder"}, {"images": "train"}, 48, 2


def check_another_label(folder, capsys):
    """As docs/how-to/questions.md asks for it: the answer of a line with that label."""
    shutil.copy("mine.yaml", "images.yaml")
    called = dict(blocks("docs/how-to/questions.md", "Why did it say dog?"))["console"]
    main([*shlex.split(called)[2:], "--html", "dog.html"])
    by_label = capsys.readouterr().out
    own = "; its own label cat"
    assert re.search(
        rf"^the log-odds of the label: \S+; label dog, predicted (cat|dog){own}$", by_label, re.M
    )
    page = Path("dog.html").read_text()
    assert "own_label cat" in page
    assert "are suspects" not in page
    write(folder / "dog.jsonl", [{"path": "new.png", "label": "dog", "id": "new"}])
    main(["ask", "images.yaml", "--file", "dog.jsonl"])
    assert capsys.readouterr().out == by_label.replace(own, "")
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["ask", "images.yaml", "--target", "new", "--label", "fox"])
    assert "A label must be one of cat, dog. Found fox." in capsys.readouterr().err


def test_another_label_is_a_class():
    """Samples that get another label: library/test_study.py."""
    text = Asked(7, {"input_ids": torch.ones(2), "labels": torch.tensor(1)})
    other = as_of_class(text, "0", STUDY, "text_classification")
    assert (other.own_label, other.sample["labels"].item()) == (1, 0)
    with refused("queries.label", "the number of a class", "fox"):
        as_of_class(text, "fox", STUDY, "text_classification")
    with refused("queries.label", "regression"):
        as_of_class(text, "0", STUDY, "regression")


@pytest.mark.parametrize("make", [make_table, make_images])
def test_ready_made_studies_take_the_lines_of_an_experiment(tmp_path, monkeypatch, capsys, make):
    config, arguments, n_inputs, n_outputs = make(tmp_path)
    (tmp_path / "nets.py").write_text(NETS.format(n_inputs))
    weights = {"1.weight": torch.randn(n_outputs, n_inputs), "1.bias": torch.zeros(n_outputs)}
    torch.save(weights, tmp_path / "c0.pt")
    config |= {
        "study_arguments": {**arguments, "model": "nets.py:net"},
        "checkpoints": {"c0": "c0.pt"},
        "experiments": {"asked": {"data": "asked.jsonl"}},
        "projection": {"proj_dim": 16},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    results = run_config(tmp_path / "mine.yaml")
    scores = read_scores(results / "scores/asked.h5").iloc[:, 0]
    monkeypatch.chdir(tmp_path)
    line = json.loads((tmp_path / "asked.jsonl").read_text())
    asked = trak_core.open("results").ask(line).scores.to_numpy()
    assert np.abs(asked - scores.to_numpy()).max() <= 1e-6 * np.abs(scores).max()
    main(["ask", "mine.yaml", "--file", "asked.jsonl", "--html", "out.html", "--top", "1"])
    out = capsys.readouterr().out
    assert f"train {scores.idxmax()}" in out
    if make is make_images:  # the class by its name, and once
        run = trak_core.open("results")
        with refused("attribution.no_tokens"):
            run.tokens(run.score([run.sample("new", "asked")]))
        assert re.search(
            r"^the log-odds of the label: \S+; label cat, predicted (cat|dog)$", out, re.M
        )
        words = ["--csv", "out.csv", "--top", "1", "--tokens"]
        main(["ask", "mine.yaml", "--file", "asked.jsonl", *words])
        told = capsys.readouterr()
        assert out.endswith(told.out)
        assert told.err.count("Notice: answers will not contain scores by token") == 1
        table = pd.read_csv("out.csv")
        assert table["label"].tolist() == [i.partition("/")[0] for i in table["train_id"]]
        assert {*table["prediction"]} <= {"cat", "dog"}
        rows = re.findall(r"  train (\w+)/\d+.png  label (\w+)\n(?!    )", out)
        assert len(rows) == 2
        assert all(folder == label for folder, label in rows)
        check_another_label(tmp_path, capsys)
    else:
        assert re.search(r"^the prediction: \S+; label 4.5$", out, re.M)
        labels = re.findall(r"train r(\d+)  label (\S+)$", out, re.M)
        assert labels
        assert all(label == f"{int(row) + 1 / 3:.3g}" for row, label in labels)
    page = (tmp_path / "out.html").read_text()
    assert ("data:image/png" in page) == (make is make_images)
    (target,) = data_of(Page(page))["targets"]
    assert target["words"].startswith("label cat, predicted") == (make is make_images)
    assert ("--label CLASS" in page) == (target["words"] == "label cat, predicted dog")
    assert make is not make_images or target["sample"][-1] == ""
    assert f"Study: {config['study']}<" in page
    sys.modules.pop("nets")
