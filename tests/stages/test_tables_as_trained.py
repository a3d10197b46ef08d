"""Tables are scaled as in training, with the arguments of docs/how-to/ready-made.md."""

import re

import numpy as np
import pandas as pd
import torch
import yaml
from pages import blocks
from refused import refused
from sklearn.preprocessing import StandardScaler

from trak_core.ready_made.tabular import tabular


def test_columns_are_scaled_as_scikit_learn_does(here):
    """The scale is that of the training rows."""
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
    with refused("studies.scale", "'minmax'"):
        tabular(**arguments | {"scale": "minmax"})
    rows.assign(share=[1.0, np.inf, *columns["share"][2:]]).to_csv("train.csv", index=False)
    with refused("studies.numbers", re.compile(r"^train.csv, line 3(?=: )"), re.compile(r"\{.*\}")):
        tabular(**arguments)


def test_a_cell_with_a_class_s_number_is_the_class(here):
    """Cells of a table of targets are texts."""
    pd.DataFrame({"a": [0.5, 1.5], "kind": [0, 1]}).to_csv("train.csv", index=False)
    study = tabular("train.csv", "kind", "net.py:Net")
    _, known = study.train_data()[1]
    inputs, kind = study.encode(a="0.5", kind="1")
    assert inputs.tolist() == [0.5]
    assert (kind.item(), kind.dtype) == (1, known.dtype) == (1, torch.int64)
