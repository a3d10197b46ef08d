"""Layers for which settings of torch change gradients or hide the graph."""

from functools import partial

import pytest
import torch
from architectures import Net
from differences import by_differences
from gramians import gramian_of
from torch import nn
from torch.nn.functional import embedding, embedding_bag
from torch.utils.checkpoint import checkpoint

from trak_core.gradients import (
    check_samples_apart,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    in_evaluation_mode,
    select_parameters,
)
from trak_core.gradients.batch_size import sample_memory
from trak_core.model_outputs.supervised import CLASSIFICATION

METHODS = [gradients_at_once, gradients_in_turn, gradients_one_by_one]


def averaged(m, tokens):
    return m.head(m.table(tokens).mean(1).tanh())


def bagged(m, tokens):
    return m.head(m.table(tokens).tanh())


def checkpointed(m, tokens, *, is_reentrant):
    return m.head(checkpoint(m.body, m.table(tokens).mean(1), use_reentrant=is_reentrant))


def looked_up(m, tokens):
    found = embedding(tokens, m.weights, sparse=True, scale_grad_by_freq=True)
    bags = embedding_bag(tokens, m.weights, mode="sum", sparse=True)
    return m.head((found.mean(1) + bags).tanh())


def spectral(m, tokens):
    """Multiplies complex numbers by a real parameter."""
    spectrum = torch.fft.rfft(m.table(tokens).mean(1))
    return m.head(torch.fft.irfft(spectrum * m.filter, n=4))


TABLE = partial(nn.Embedding, 5, 4)
BODY = {"body": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())}
MODELS = {
    "sparse table": (averaged, {"table": partial(TABLE, sparse=True)}),
    "sparse functions": (looked_up, {"weights": lambda: nn.Parameter(torch.randn(5, 4))}),
    "by frequency": (averaged, {"table": partial(TABLE, scale_grad_by_freq=True)}),
    "bag by frequency": (bagged, {"table": lambda: nn.EmbeddingBag(5, 4, scale_grad_by_freq=True)}),
    "checkpoint": (partial(checkpointed, is_reentrant=False), {"table": TABLE, **BODY}),
    "reentrant": (partial(checkpointed, is_reentrant=True), {"table": TABLE, **BODY}),
    "spectrum": (spectral, {"table": TABLE, "filter": lambda: nn.Parameter(torch.randn(3))}),
    "compiled": (averaged, {"table": TABLE}),
}


@pytest.fixture(params=MODELS)
def model(request):
    forward, parts = MODELS[request.param]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    made = Net(forward, {**parts, "head": lambda: nn.Linear(4, 3)}).eval()
    yield torch.compile(made, backend="aot_eager") if request.param == "compiled" else made
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # without a graph
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch.compile on Python 3.13.0
def test_gradients_are_those_of_the_output_by_one_pass(model, capsys):
    """Samples repeat tokens, for which ``scale_grad_by_freq`` matters."""
    batch = torch.tensor([[0, 1, 1, 1], [2, 2, 3, 1], [4, 0, 2, 0]]), torch.tensor([0, 2, 1])
    parameters = select_parameters(model, None)
    expected = by_differences(model, *batch)
    sample_memory(model, parameters, CLASSIFICATION, batch)
    check_samples_apart(model, CLASSIFICATION, batch)
    assert gradient_method(model, parameters, CLASSIFICATION, batch) is gradients_at_once
    assert not capsys.readouterr().out
    for method in METHODS:
        found = formed_gradients(method, model, parameters, CLASSIFICATION, batch).gradients
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    flat = torch.cat([rows.flatten(1) for rows in expected.values()], dim=1)
    with in_evaluation_mode(model):
        gramian = gramian_of(model, parameters, CLASSIFICATION, batch)
    torch.testing.assert_close(gramian, flat @ flat.T, rtol=1e-6, atol=1e-8)


def test_torch_is_restored():
    owners = torch, torch.utils.checkpoint
    before = [dict(vars(owner)) for owner in owners]
    with in_evaluation_mode(nn.Embedding(5, 4)):
        assert torch.embedding is not before[0]["embedding"]
    assert [vars(owner) for owner in owners] == before
