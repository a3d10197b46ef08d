"""Tables are scaled as in training, with the arguments of docs/how-to/ready-made.md."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pages import blocks
from refused import refused
from sklearn.preprocessing import StandardScaler

from trak_core.ready_made.tabular import tabular


def test_columns_are_scaled_as_scikit_learn_does(tmp_path, monkeypatch):
    """The scale is that of the training rows. Pages show the numbers of the table."""
    monkeypatch.chdir(tmp_path)
    page = dict(blocks("docs/how-to/ready-made.md", "Tables"))
    arguments = yaml.safe_load(page["yaml scaled.yaml"])["study_arguments"]
    random = np.random.default_rng(0)
    columns = {
        "area": random.uniform(3e4, 2e5, 50),
        "same": 0.1,
        "share": random.normal(0, 1e-3, 50),
    }
    rows = pd.DataFrame(columns).assign(price=random.normal(size=50))
    rows[:40].to_csv("train.csv", index=False)
    rows[40:].to_csv("test.csv", index=False)
    arguments["columns"] = ["area", "same", "share"]
    study = tabular(**arguments)
    inputs = rows[["area", "same", "share"]].to_numpy()
    scaler = StandardScaler().fit(inputs[:40])
    for samples, part in ((study.train_data(), inputs[:40]), (study.target_data(), inputs[40:])):
        scaled = torch.stack([x for x, _ in samples])
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled, scaler.transform(part), rtol=1e-6, atol=1e-6)
    asked, label = study.encode(**{name: str(rows[name][45]) for name in rows})
    assert torch.equal(asked, study.target_data()[5][0])
    assert label.item() == np.float32(rows["price"][45])
    shown = re.findall(r"(area|same|share) ([^,]+)", study.describe((asked, label)))
    assert [name for name, _ in shown] == ["area", "same", "share"]
    # A number is rounded to a power of ten of at most ten times its float32 error, and to 7 digits.
    eps = np.finfo(np.float32).eps
    limits = 6 * eps * np.abs(inputs[45] - scaler.mean_) + 5e-7 * np.abs(inputs[45])
    assert (np.abs([float(text) for _, text in shown] - inputs[45]) <= limits).all()
    with refused("studies.scale", "'minmax'"):
        tabular(**arguments | {"scale": "minmax"})
    rows.assign(share=[1.0, np.inf, *columns["share"][2:]]).to_csv("train.csv", index=False)
    with refused("studies.numbers", re.compile(r"^train.csv, line 3(?=: )"), re.compile(r"\{.*\}")):
        tabular(**arguments)


@pytest.mark.parametrize("scale", [None, "standard"])
def test_pages_show_the_numbers_of_the_table(tmp_path, monkeypatch, scale):
    """A scaled 0 is not shown as 2.6e-09."""
    monkeypatch.chdir(tmp_path)
    table = "a,b,c,price\n0,1234.5,0.1,1\n3.06,-14.23,0,2\n0.7,1065,-0.25,3\n"
    (tmp_path / "train.csv").write_text(table)
    study = tabular("train.csv", "price", "net.py:Net", scale=scale)
    shown = [study.describe(sample) for sample in study.train_data()]
    names, *rows = (line.split(",")[:3] for line in table.splitlines())
    assert shown[0] == ", ".join(map(" ".join, zip(names, rows[0], strict=True)))
    assert shown[1].startswith("a 3.06, b -14.23, c 0")
    assert shown[2] == "a 0.7, b 1065, c -0.25"


def test_a_cell_with_a_class_s_number_is_the_class(tmp_path, monkeypatch):
    """Cells of a table of targets are texts."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": [0.5, 1.5], "kind": [0, 1]}).to_csv("train.csv", index=False)
    study = tabular("train.csv", "kind", "net.py:Net")
    _, known = study.train_data()[1]
    inputs, kind = study.encode(a="0.5", kind="1")
    assert inputs.tolist() == [0.5]
    assert (kind.item(), kind.dtype) == (1, known.dtype) == (1, torch.int64)
