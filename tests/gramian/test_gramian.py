"""The engine against the full Jacobian, for each architecture."""

import re

import pytest
import torch
from architectures import ARCHITECTURES
from refused import refused
from torch import nn

from trak_core.gradients import choose_method, formed_gradients, select_parameters
from trak_core.gradients.gradient_methods import (
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
)
from trak_core.gramian import Engine
from trak_core.model_outputs.model_output import ModelOutput

pytestmark = pytest.mark.usefixtures("float64")


def trained(*modules):
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def by_entries(output, parameters):
    """Gradients by autograd, one entry of the output at a time: (entries, *shape) a parameter."""
    rows = [
        torch.autograd.grad(entry, parameters, retain_graph=True, materialize_grads=True)
        for entry in output.flatten()
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def by_jacobian(output, parameters):
    """The definition."""
    jacobian = torch.cat([g.reshape(len(g), -1) for g in by_entries(output, parameters)], 1)
    n = output.ndim
    gramian = (jacobian @ jacobian.T).view(output.shape + output.shape)
    return gramian.permute((*range(n), *reversed(range(n, 2 * n))))


def assert_equal(found, expected):
    assert expected.any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def run(name, entries):
    """Make an architecture, and a function that gives a few entries a sample, or one loss."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()

    def call():
        found = architecture.output(model(*inputs)).flatten(1)
        weights = torch.arange(1.0, 1 + found.shape[1]).sqrt()
        return found[:, :entries] if entries else (found * weights).square().sum(1)

    return model, inputs, call


# Architectures for which some operation is differentiated for each sample or row.
SLOW = {
    *("parameter reused", "parameter squared", "scalar parameter", "LSTM, both ways"),
    *("parameter of the batch's shape", "random with parameters"),
    *("relative positions", "loop over a cell", "PReLU", "InstanceNorm", "in place", "einsum"),
    *("cross-attention with bias vectors", "embedding bag", "bilinear", "weight norm"),
    *("orthogonal weight", "user's function", "user's function of two outputs"),
    *("user's functions that mix samples", "routed samples", "samples as columns"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gramian_is_that_of_the_jacobian(name, request):
    """With and without ``batch_dim``; unless ``SLOW``, one backward pass is enough."""
    model, _, call = run(name, 2)
    output = call()
    gramians = [Engine(model).compute_gramian(output)]
    if name not in SLOW:
        request.getfixturevalue("one_pass_only")
    gramians.append(Engine(model, batch_dim=0).compute_gramian(output))
    expected = by_jacobian(output, trained(model))
    for gramian in gramians:
        assert_equal(gramian, expected)


# Operations that mix samples.
HIDING = {"user's functions that mix samples": "Mixed"}
# Models that are no functions of a sample alone, for which the comparison with autograd fails.
NO_FUNCTIONS = {
    *("parameter of the batch's shape", "random with parameters"),
    *("picked by index", "routed samples"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_goes_at_once_or_says_why_not(name, monkeypatch, capsys):
    """Gradients are formed whole or in pieces. A notice names the operation that mixes samples."""
    model, inputs, call = run(name, 0)
    architecture = ARCHITECTURES[name]
    model.eval()
    output = ModelOutput(
        read=lambda returned: architecture.output(returned).flatten(1),
        value=lambda x, _: (x * torch.arange(1.0, 1 + len(x)).sqrt()).square().sum(),
        loss_weight=lambda x, _: x.sum(),
        prediction=lambda x, _: x.sum(),
        has_labels=False,
    )
    parameters = select_parameters(model, None)
    method, notice = choose_method(model, parameters, output, inputs, reads_terms=True)
    said = capsys.readouterr().out + (notice or "")
    methods = [gradients_at_once, gradients_in_turn, gradients_one_by_one]
    if name in HIDING or name in NO_FUNCTIONS:
        assert method is (gradients_in_turn if name in HIDING else gradients_one_by_one)
        assert HIDING.get(name, "it ") in said.partition(" for this model. Reason: ")[2]
        methods = methods[:1]
    else:
        assert method is gradients_at_once
        assert not said
    if name == "random with parameters":  # another pass draws other numbers
        return
    expected = dict(zip(parameters, by_entries(call(), [*parameters.values()]), strict=True))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for piece in (2**22, 7):
        monkeypatch.setattr("trak_core.gradients.gradient_terms.PIECE", piece)
        for one in methods:
            found = formed_gradients(one, model, parameters, output, inputs).gradients
            for key, gradient in expected.items():
                assert float((found[key] - gradient).abs().max()) <= 1e-9 * largest, (one, key)


@pytest.mark.parametrize(
    "name", [n for n in ARCHITECTURES if re.search(r"linear|Conv|embed|Norm|pool", n)]
)
def test_all_ways_give_the_same(name, monkeypatch):
    """Pieces of a few entries, and both formulas for inner products."""
    prefers = {"all": False}
    for path, value in {
        "gradients.gradient_terms.prefers_inner_products": lambda *_: prefers["all"],
        "gradients.convolution_gradients.prefers_inner_products": lambda *_: prefers["all"],
        "gradients.gradient_terms.PIECE": 100,
        "gradients.convolution_gradients._CHANNELS_BY_POSITION": 1,
        "gradients.gradient_formulas._CACHED": 10,
    }.items():
        monkeypatch.setattr(f"trak_core.{path}", value)
    model, _, call = run(name, 2)
    output = call()
    expected = by_jacobian(output, trained(model))
    for prefers["all"] in (False, True):
        assert_equal(Engine(model, batch_dim=0).compute_gramian(output), expected)


@pytest.fixture
def model(float64):
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 24))


@pytest.mark.parametrize(
    ("shape", "batch_dim"),
    [
        *(((), None), ((7,), None), ((7,), 0), ((7, 2), 0), ((2, 7), 1), ((2, 7), -1)),
        *(((2, 7, 3), 1), ((7, 3, 2, 2), 0), ((2, 3, 2, 7), 3), ((2, 2, 7, 2), None), ((1, 7), 0)),
        *(((0,), 0), ((0, 2), 0), ((0,), None)),
    ],
)
def test_outputs_of_any_shape(model, shape, batch_dim):
    n_samples = shape[batch_dim] if batch_dim is not None else 7 if all(shape) else 0
    each = max(1, torch.Size(shape).numel() // max(1, n_samples)) if shape else 1
    output = model(torch.randn(n_samples, 5))[:, :each]
    if not shape:
        output = output.sum()
    elif batch_dim is None:
        output = output.reshape(shape)
    else:
        others = [n for i, n in enumerate(shape) if i != batch_dim % len(shape)]
        output = output.reshape(n_samples, *others).movedim(0, batch_dim)
    assert output.shape == shape
    gramian = Engine(model, batch_dim=batch_dim).compute_gramian(output)
    assert gramian.shape == (*shape, *reversed(shape))
    if output.numel():
        assert_equal(gramian, by_jacobian(output, trained(model)))


def test_several_modules_and_parameters_outside_of_them():
    first, second, third = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    output = third(second(first(torch.randn(3, 5)).tanh()).tanh())
    for batch_dim in (None, 0):
        found = Engine(first, third, batch_dim=batch_dim).compute_gramian(output)
        assert_equal(found, by_jacobian(output, trained(first, third)))
    unused = Engine(nn.Linear(2, 2), batch_dim=0).compute_gramian(output)
    assert unused.shape == (3, 2, 2, 3)
    assert not unused.any()


def test_bad_arguments_are_refused(model):
    with refused("gramian.no_module"):
        Engine()
    engine = Engine(model, batch_dim=0)
    with torch.no_grad():
        output = model(torch.randn(3, 5))
    with refused("gramian.no_graph", "a tensor without"):
        engine.compute_gramian(output)
    with refused("gramian.no_graph", "tuple"):
        engine.compute_gramian((output,))
    with refused("gramian.batch_dim", "batch_dim = 0", "()"):
        engine.compute_gramian(model(torch.randn(3, 5)).sum())


def test_batch_norm_over_samples_is_refused():
    """The mode at the time of the forward pass decides."""
    model, inputs = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)), torch.randn(4, 5)
    output = model(inputs)
    with refused("gramian.mixed_samples"):
        Engine(model, batch_dim=0).compute_gramian(output)
    assert_equal(Engine(model).compute_gramian(output), by_jacobian(output, trained(model)))
    output = model.eval()(inputs)
    model.train()
    found = Engine(model, batch_dim=0).compute_gramian(output)
    assert_equal(found, by_jacobian(output, trained(model)))
