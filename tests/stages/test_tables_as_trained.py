"""Tables as their training scaled them: docs/how-to/ready-made.md's recipe, and class numbers."""

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pages import blocks, run_code
from pipeline import run_config
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
    """Return weights of a network, trained on columns that are scaled on the way to it."""
    inputs = table[["area", "rooms"]]
    x = torch.tensor(((inputs - inputs.mean()) / inputs.std()).to_numpy(), dtype=torch.float32)
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
    """Write tables, weights and files of the page; return ids of rows with a wrong price."""
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
    (tmp_path / "scale.py").write_text(PAGE["python scale.py"])
    return set(wrong.tolist())


def n_found(config, wrong, folder):
    config |= {"experiments": {"some": {"targets": "all"}}, "results": config["study"] + "-results"}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    results = folder / run_config(path)
    suspects = pd.read_hdf(results / "scores/some.h5", "train").sort_values("harm")["id"]
    outputs = pd.read_hdf(results / "scores/some.h5", "targets")["output"]
    return len(wrong.intersection(suspects.iloc[-N_WRONG:])), outputs


def test_wrong_prices_are_found_among_columns_as_they_were_scaled(planted, tmp_path):
    """By chance 1.3 of 20 are; the network's predictions are its own, as it was trained."""
    run_code(PAGE["python scale.py"])
    scaled = yaml.safe_load(PAGE["yaml scaled.yaml"])
    n_scaled, outputs = n_found(scaled, planted, tmp_path)
    as_measured = yaml.safe_load(PAGE["yaml scaled.yaml"].replace("scaled_", ""))
    as_measured["study_arguments"] |= {"table": "train.csv", "targets": "test.csv"}
    n_measured, others = n_found(as_measured, planted, tmp_path)
    assert n_scaled >= N_WRONG // 2
    assert n_measured < n_scaled
    table, asked = (pd.read_csv(name)[["area", "rooms"]] for name in ("train.csv", "test.csv"))
    weights = {name: w.numpy() for name, w in torch.load("run.pt").items()}
    x = ((asked - table.mean()) / table.std()).to_numpy()
    hidden = np.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    expected = (hidden @ weights["2.weight"].T + weights["2.bias"])[:, 0]
    np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-4)
    assert np.abs(others - expected).max() > 0.5


def test_a_cell_with_a_class_s_number_is_the_class(tmp_path, monkeypatch):
    """Cells of a table to explain come as texts."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"a": [0.5, 1.5], "kind": [0, 1]}).to_csv("train.csv", index=False)
    study = tabular("train.csv", "kind", "net.py:Net")
    _, known = study.train_data()[1]
    inputs, kind = study.encode(a="0.5", kind="1")
    assert inputs.tolist() == [0.5]
    assert (kind.item(), kind.dtype) == (1, known.dtype) == (1, torch.int64)
