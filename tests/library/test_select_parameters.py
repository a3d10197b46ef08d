"""Selection of parameters by patterns, and refused parameters."""

import pytest
import torch
from refused import refused
from torch import nn

from trak_core.gradients import formed_gradients, gradients_at_once, gradients_one_by_one
from trak_core.gradients.differentiable_model import select_parameters
from trak_core.model_outputs.supervised import REGRESSION


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    assert list(select_parameters(model, None)) == ["1.weight", "1.bias"]
    # A pattern that matches trainable parameters selects no frozen ones.
    assert list(select_parameters(model, ["*.weight"])) == ["1.weight"]
    assert not model[0].weight.requires_grad
    model.requires_grad_(False)
    with refused("gradients.no_parameter", "All of its 4 parameters are frozen"):
        select_parameters(model, None)


def test_patterns_of_nothing_and_of_integers_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with refused("gradients.unmatched_pattern", "'lora'", "0.weight, 0.bias, 1.weight, 1.bias"):
        select_parameters(model, ["0.*", "lora"])
    quantized = torch.zeros(3, 3, dtype=torch.int8)
    model[0].weight = nn.Parameter(quantized, requires_grad=False)
    assert "0.weight" not in select_parameters(model, None)
    with refused("gradients.parameter_dtype", "0.weight torch.int8"):
        select_parameters(model, ["*.bias", "0.weight"])


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 1)
    model.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused("gradients.parameter_dtype", "filter torch.complex64"):
        select_parameters(model, None)
    assert list(select_parameters(model, ["weight"])) == ["weight"]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: nn.LazyLinear(3), "1.weight, 1.bias"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "1.running_mean, 1.running_var"),
    ],
)
def test_lazy_parameters_are_refused(layer, names):
    model = nn.Sequential(nn.Linear(2, 2), layer())
    with refused("gradients.lazy_parameter", names):
        select_parameters(model, ["0.*"])


def test_frozen_parameters_that_only_a_pattern_names_are_differentiated():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    batch = torch.randn(4, 3), torch.randn(4)

    def gradients(method, patterns):
        parameters = select_parameters(model, patterns)
        return formed_gradients(method, model, parameters, REGRESSION, batch).gradients

    ours = gradients(gradients_at_once, ["0.*", "*.bias"])
    assert list(ours) == ["0.weight", "0.bias", "2.bias"]
    model.requires_grad_(True)
    torch.testing.assert_close(ours, gradients(gradients_one_by_one, ["0.*", "2.bias"]))
    model.requires_grad_(False)
    assert list(select_parameters(model, ["0.w*"])) == ["0.weight"]
    assert [p.requires_grad for p in model.parameters()] == [True, False, False, False]
