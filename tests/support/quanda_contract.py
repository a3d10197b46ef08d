"""Run the example of quanda, and compare its explainer with an Attributor and quanda's interface.

Call it with the path of the example. It is a script, because quanda configures logging and warns
when it is imported.
"""

import runpy
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from trak_core import Attributor
from trak_core.errors import InputError

try:
    import torchvision  # ruff: ignore[unused-import]
except RuntimeError:  # It is for another torch, as in test_real_networks.py.
    for operator in ("nms", "qnms"):
        signature = "(Tensor boxes, Tensor scores, float least) -> Tensor"
        torch.library.define(f"torchvision::{operator}", signature)

example = runpy.run_path(sys.argv[1])
import quanda  # ruff: ignore[module-import-not-at-top-of-file]

TrakCore, model, train, paths = (example[name] for name in ("TrakCore", "model", "train", "paths"))
few = example["asked"][:7], example["predicted"][:7]

# The scores of an Attributor: a row for each target, a column for each training sample.
of_one, of_three = (example["explainers"][name] for name in ("TrakCore", "TrakCore of 3"))
for explainer, checkpoints in ((of_one, None), (of_three, dict(zip("012", paths, strict=False)))):
    attributor = Attributor(model, "image_classification", checkpoints).fit(train)
    explained = explainer.explain(*few)
    assert (explained.shape, explained.dtype) == ((7, 1200), torch.float32)
    np.testing.assert_array_equal(explained.T, attributor.score(few).frame)
    expected = attributor.self_influence()["self_influence"].astype(np.float32)
    np.testing.assert_array_equal(explainer.self_influence(), expected)
    # quanda's own definition of self-influences: the diagonal of all explanations.
    by_quanda = quanda.Explainer.self_influence(explainer, batch_size=500)
    np.testing.assert_allclose(explainer.self_influence(), by_quanda, rtol=2e-3, atol=1e-6)

# Columns follow the order of the training samples.
inputs, labels = (tensor.flip(0) for tensor in train.tensors)
reversed_ = TrakCore(model, TensorDataset(inputs, labels))
scale = explained.abs().max().item()
expected = of_one.explain(*few)
np.testing.assert_allclose(reversed_.explain(*few).flip(1), expected, atol=1e-4 * scale)

# Labels are those of the targets, true or predicted, in a tensor or a list; batches may differ.
torch.testing.assert_close(of_one.explain(few[0], few[1].tolist()), expected, rtol=0, atol=0)
one = of_one.explain(few[0][3:4], few[1][3:4])
np.testing.assert_allclose(one, expected[3:4], atol=1e-5 * scale)
assert (of_one.explain(few[0], (few[1] + 1) % 10) != expected).any(dim=1).all()

# What metrics and benchmarks pass. The model keeps its weights.
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
loaded = []


def load(network, path):
    loaded.append(path)
    network.load_state_dict(torch.load(path))


given = {"checkpoints": paths[1], "checkpoints_load_func": load}
second = TrakCore(model=model, train_dataset=train, task="image_classification", **given)
np.testing.assert_array_equal(
    second.explain(*few).T,
    Attributor(model, "image_classification", {"0": paths[1]}).fit(train).score(few).frame,
)
assert loaded == [paths[1]]
torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
metric = quanda.MislabelingDetectionMetric(
    model, train, example["wrong"], TrakCore, expl_kwargs={"proj_dim": 64}
)
assert metric.compute()["score"] > 0.7
randomized = quanda.ModelRandomizationMetric(
    model=model,
    model_id="one",
    cache_dir="kept",
    train_dataset=train,
    explainer_cls=TrakCore,
    expl_kwargs={"cache_dir": "kept"},
    checkpoints=paths[0],
)
randomized.update(expected, *few)
assert abs(randomized.compute()["score"]) < 0.9

# A folder is used again for the same data, and refused for other data. Tasks of texts are refused.
kept = {"cache_dir": "kept", "model_id": "one"}
for _ in range(2):
    torch.testing.assert_close(TrakCore(model, train, **kept).explain(*few), expected)
with pytest.raises(InputError, match="same data"):
    TrakCore(model, TensorDataset(inputs, labels), **kept)
with pytest.raises(ValueError, match="not supported"):
    TrakCore(model, train, task="causal_lm")
