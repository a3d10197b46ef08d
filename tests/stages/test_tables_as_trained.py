"""Tables are scaled as in training, with the config of docs/how-to/ready-made.md."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pages import blocks
from pipeline import run_config
from refused import refused
from sklearn.preprocessing import StandardScaler
from torch import nn

from trak_core.ready_made.tabular import tabular

PAGE = dict(blocks("docs/how-to/ready-made.md", "Tables"))
N_WRONG = 20
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
"""


def prices(random, n):
    table = pd.DataFrame({"area": random.uniform(30, 200, n), "rooms": random.integers(1, 8, n)})
    area, rooms = (table["area"] - 115) / 49, (table["rooms"] - 4) / 2
    return table.assign(price=np.sin(area) + area * rooms / 2 + random.normal(0, 0.1, n))


def train(table):
    """Return the weights of a network trained on scaled columns."""
    inputs = table[["area", "rooms"]]
    x = ((inputs - inputs.mean()) / inputs.std(ddof=0)).to_numpy()
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor(table[["price"]].to_numpy(), dtype=torch.float32)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(400):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    return net.state_dict()


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write tables, weights and the network. Return ids of rows with a wrong price."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    table = prices(random, 300)
    wrong = random.choice(300, N_WRONG, replace=False)
    price = table["price"].to_numpy(copy=True)
    price[wrong] = -price[wrong] - np.sign(price[wrong]) / 2
    table = table.assign(price=price)
    table.to_csv("train.csv", index=False)
    prices(random, 60).to_csv("test.csv", index=False)
    torch.save(train(table), "run.pt")
    (tmp_path / "net.py").write_text(NET)
    return set(wrong.tolist())


def find_wrong(config, wrong, folder):
    config |= {"experiments": {"some": {"targets": "all"}}, "results": config["study"] + "-results"}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    results = folder / run_config(path)
    suspects = pd.read_hdf(results / "scores/some.h5", "train").sort_values("harm")["id"]
    outputs = pd.read_hdf(results / "scores/some.h5", "targets")["output"]
    return len(wrong.intersection(suspects.iloc[-N_WRONG:])), outputs


def test_wrong_prices_are_found_with_scaled_columns(planted, tmp_path):
    """By chance 1.3 of 20 would be found. Outputs are those of the network on scaled columns."""
    scaled = yaml.safe_load(PAGE["yaml scaled.yaml"])
    as_measured = yaml.safe_load(PAGE["yaml scaled.yaml"])
    del as_measured["study_arguments"]["scale"]
    n_scaled, outputs = find_wrong(scaled, planted, tmp_path)
    n_measured, others = find_wrong(as_measured, planted, tmp_path)
    assert n_scaled >= N_WRONG // 2
    assert n_measured < n_scaled
    table, targets = (pd.read_csv(name)[["area", "rooms"]] for name in ("train.csv", "test.csv"))
    weights = {name: w.numpy() for name, w in torch.load("run.pt").items()}
    x = ((targets - table.mean()) / table.std(ddof=0)).to_numpy()
    hidden = np.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    expected = (hidden @ weights["2.weight"].T + weights["2.bias"])[:, 0]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)
    assert np.abs(others - expected).max() > 0.5


def test_columns_are_scaled_as_scikit_learn_does(tmp_path, monkeypatch):
    """The scale is that of the training rows. Pages show the numbers of the table."""
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
    shown = re.findall(r"(area|same|share) ([^,]+)", study.describe((asked, label)))
    assert [name for name, _ in shown] == ["area", "same", "share"]
    # A number is rounded to a power of ten of at most ten times its float32 error, and to 7 digits.
    eps = np.finfo(np.float32).eps
    limits = 6 * eps * np.abs(inputs[45] - scaler.mean_) + 5e-7 * np.abs(inputs[45])
    assert (np.abs([float(text) for _, text in shown] - inputs[45]) <= limits).all()
    with refused("studies.scale", "'minmax'"):
        tabular("train.csv", **given, scale="minmax")
    rows.assign(share=[1.0, np.inf, *columns["share"][2:]]).to_csv("train.csv", index=False)
    with refused("studies.numbers", re.compile(r"^train.csv, line 3(?=: )"), re.compile(r"\{.*\}")):
        tabular("train.csv", **given, scale="standard")


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
