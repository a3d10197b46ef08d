"""Tables are scaled as in training, with the config of docs/how-to/ready-made.md."""

import re

import numpy as np
import pandas as pd
import torch
import yaml
from pages import blocks
from pipeline import run_config
from refused import refused
from sklearn.preprocessing import StandardScaler
from torch import nn

from trak_core.ready_made.tabular import tabular

PAGE = dict(blocks("docs/how-to/ready-made.md", "Tables"))
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
"""


def test_outputs_are_those_of_the_network_on_scaled_columns(tmp_path, monkeypatch):
    """With the page's config; without `scale` the network gets other numbers."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    names = ["area", "rooms"]
    for name, n in (("train.csv", 60), ("test.csv", 20)):
        columns = {"area": random.uniform(30, 200, n), "rooms": random.integers(1, 8, n)}
        pd.DataFrame(columns | {"price": random.normal(size=n)}).to_csv(name, index=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    torch.save(net.state_dict(), "run.pt")
    (tmp_path / "net.py").write_text(NET)
    outputs = []
    for scale in ("standard", None):
        config = yaml.safe_load(PAGE["yaml scaled.yaml"]) | {"results": f"results-{scale}"}
        config["study_arguments"]["scale"] = scale
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
        results = run_config(tmp_path / "mine.yaml")
        outputs.append(pd.read_hdf(results / "scores/some.h5", "targets")["output"])
    table, targets = (pd.read_csv(name)[names] for name in ("train.csv", "test.csv"))
    x = ((targets - table.mean()) / table.std(ddof=0)).to_numpy()[:2]
    expected = net(torch.tensor(x, dtype=torch.float32)).detach().numpy()[:, 0]
    np.testing.assert_allclose(outputs[0], expected, rtol=0, atol=1e-4)
    assert np.abs(outputs[1] - expected).max() > 0.1


def test_columns_are_scaled_as_scikit_learn_does(tmp_path, monkeypatch):
    """The scale is that of the training rows."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    columns = {
        "area": random.uniform(3e4, 2e5, 50),
        "same": 0.1,
        "share": random.normal(0, 1e-3, 50),
    }
    rows = pd.DataFrame(columns).assign(price=random.normal(size=50))
    rows[:40].to_csv("train.csv", index=False)
    rows[40:].to_csv("test.csv", index=False)
    given = {"label": "price", "model": "net.py:Net", "targets": "test.csv"}
    study = tabular("train.csv", **given, scale="standard")
    inputs = rows[["area", "same", "share"]].to_numpy()
    scaler = StandardScaler().fit(inputs[:40])
    for samples, part in ((study.train_data(), inputs[:40]), (study.target_data(), inputs[40:])):
        scaled = torch.stack([x for x, _ in samples])
        assert scaled.dtype == torch.float32
        np.testing.assert_allclose(scaled, scaler.transform(part), rtol=1e-6, atol=1e-6)
    asked, label = study.encode(**{name: str(rows[name][45]) for name in rows})
    assert torch.equal(asked, study.target_data()[5][0])
    assert label.item() == np.float32(rows["price"][45])
    with refused("studies.scale", "'minmax'"):
        tabular("train.csv", **given, scale="minmax")
    rows.assign(share=[1.0, np.inf, *columns["share"][2:]]).to_csv("train.csv", index=False)
    with refused("studies.numbers", re.compile(r"^train.csv, line 3(?=: )"), re.compile(r"\{.*\}")):
        tabular("train.csv", **given, scale="standard")


def test_a_cell_with_a_class_s_number_is_the_class(tmp_path, monkeypatch):
    """Cells of a table of targets are texts."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": [0.5, 1.5], "kind": [0, 1]}).to_csv("train.csv", index=False)
    study = tabular("train.csv", "kind", "net.py:Net")
    _, known = study.train_data()[1]
    inputs, kind = study.encode(a="0.5", kind="1")
    assert inputs.tolist() == [0.5]
    assert (kind.item(), kind.dtype) == (1, known.dtype) == (1, torch.int64)
