"""Models are differentiated in evaluation mode, without tensors cached in earlier passes."""

import pytest
import torch
from torch import nn

from trak_core.gradients import (
    as_batch,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.model_outputs.supervised import CLASSIFICATION

METHODS = [gradients_at_once, gradients_one_by_one, gradients_in_turn]


def gradients_of(method, model, samples, patterns=None):
    batch, parameters = as_batch(samples, CLASSIFICATION), select_parameters(model, patterns)
    return formed_gradients(method, model, parameters, CLASSIFICATION, batch).gradients


@pytest.mark.parametrize("patterns", [None, ["2.*"], ["0.*"]])
def test_transformer_layers_by_their_plain_formula(patterns):
    """Not by their inference kernels, which leave no graph."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))
    batch = [torch.randn(4, 3, 8), torch.tensor([0, 1, 2, 0])]
    at_once, one_by_one = (
        gradients_of(method, model, batch, patterns)
        for method in (gradients_at_once, gradients_one_by_one)
    )
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


class KeepsItsBias(nn.Module):
    """Caches a bias computed from a parameter until training, as models of timm do."""

    def __init__(self, keeps):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.biases = nn.Parameter(torch.randn(6))
        self.bias_cache = {}
        # Not emptied by ``train``.
        self.bound_cache = {"most": 2.0}
        self.keeps = keeps

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.bias_cache = {}

    def forward(self, x):
        if not self.keeps or "cpu" not in self.bias_cache:
            bias = self.biases[[0, 2, 2, 5]].exp()
            self.bias_cache["cpu"] = bias.clamp(max=self.bound_cache["most"])
        return self.head((self.inner(x) * self.bias_cache["cpu"]).tanh())


@pytest.mark.parametrize("method", METHODS)
def test_what_a_model_derived_earlier_and_kept_hides_no_gradient(method):
    model, plain = KeepsItsBias(True), KeepsItsBias(False)
    model.eval()
    plain.load_state_dict(model.state_dict())
    samples = torch.randn(3, 3), torch.tensor([0, 2, 1])
    with torch.no_grad():
        model(samples[0])  # fills the cache
    expected = gradients_of(method, plain, samples)
    assert expected["biases"].any()
    for _ in range(2):
        torch.testing.assert_close(gradients_of(method, model, samples), expected, rtol=0, atol=0)
    assert (model.bias_cache, model.bound_cache) == ({}, {"most": 2.0})
    assert not model.training
