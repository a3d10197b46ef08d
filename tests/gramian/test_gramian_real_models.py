"""Architectures in use: gramians by one backward pass, against per-sample gradients."""

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trak_core.gradients import formed_gradients, gradients_one_by_one, select_parameters
from trak_core.gramian import train_gramian
from trak_core.model_outputs.table import TABLE

CASES = {
    "resnet": "image_classification",
    "bert": "text_classification",
    "gpt2": "language_modelling",
    "Segmenter": "segmentation",
}


@pytest.mark.parametrize("name", CASES)
def test_the_gramian_is_the_product_of_the_gradients(name, monkeypatch):
    models = pytest.importorskip("models", reason="needs transformers, which the gate installs")

    def refuse(*_):
        raise AssertionError

    # The general path and sample by sample are for the unknown; nothing here is.
    monkeypatch.setattr("trak_core.autograd.one_pass.take_rows", refuse)
    monkeypatch.setattr("trak_core.autograd.one_pass._by_operation", refuse)
    model = getattr(models, name)().double().eval()
    samples = default_collate([models.sample(name, i, torch.float64) for i in range(5)])
    output, parameters = TABLE[CASES[name]].load(), select_parameters(model, None)
    found = formed_gradients(gradients_one_by_one, model, parameters, output, samples)
    j = torch.cat([g.flatten(1) for g in found.gradients.values()], dim=1).numpy()
    gramian = train_gramian(model, parameters, output, [samples])
    assert np.abs(gramian - j @ j.T).max() <= 1e-9 * np.abs(gramian).max()
