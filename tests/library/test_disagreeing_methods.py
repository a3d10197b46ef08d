"""The choice between methods that disagree, for batches and for samples alone."""

import sys

import pytest
import torch
from architectures import Net
from torch import nn

from trak_core.gradients import (
    choose_method,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.model_outputs.supervised import CLASSIFICATION


def scaled(factor):
    """Return a forward pass with a derivative that is wrong by a factor of the batch's size."""

    def forward(m, x):
        y = m.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * factor(len(gradient)))
        return m.head(y)

    return forward


def kinked(m, x):
    """In float32, has the two one-sided derivatives of a kink for a batch and for a sample."""
    y = m.linear(x)
    return m.head(
        (y - y.detach() + (1e-9 if len(x) > 1 else -1e-9) * (y.dtype is torch.float32)).relu()
    )


def lossy(m, x):
    """Differentiates a batch with a loss of five digits, in float64 too."""
    y = m.linear(x)
    if y.requires_grad and len(y) > 1:
        y.register_hook(lambda gradient: (gradient + 1e5) - 1e5)
    return m.head(y)


DISAGREEING = {
    "infinity": (
        scaled(lambda n: 1 if n == 1 else torch.inf),
        gradients_one_by_one,
        "gives NaN or infinity where autograd doesn't",
    ),
    "one pass is wrong": (
        scaled(lambda n: 1 + (n > 1)),
        gradients_one_by_one,
        "it differs from autograd by 1 of the largest entry, in linear.",
        "and in float64 by 1, in linear.",
        "one sample at a time, which gives the same numbers but is slower.",
    ),
    "rounding": (kinked, gradients_at_once, "in float64 by 0, so that rounding is the cause."),
    "lost digits": (
        lossy,
        gradients_one_by_one,
        "in linear.weight, and in float64 by ",
        "Gradients are computed",
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_plain_autograd_decides_where_ways_disagree(name, capsys):
    forward, expected, *said = DISAGREEING[name]
    parts = {"linear": lambda: nn.Linear(4, 4), "head": lambda: nn.Linear(4, 3)}
    model, images = Net(forward, parts), torch.randn(3, 4)
    parameters, labels = select_parameters(model, None), torch.tensor([0, 2, 1])
    given = model, parameters, CLASSIFICATION, (images, labels)
    method = gradient_method(*given)
    notice = capsys.readouterr().out
    assert method is choose_method(*given, reads_terms=True)[0] is expected
    assert all(words in notice for words in said), notice
    if method is gradients_one_by_one:
        found = formed_gradients(method, *given)
        for i in range(len(labels)):
            f = CLASSIFICATION.value(model(images[i : i + 1]), labels[i : i + 1])[0]
            expected = torch.autograd.grad(f, list(parameters.values()))
            for gradients, own in zip(found.gradients.values(), expected, strict=True):
                torch.testing.assert_close(gradients[i], own)


def test_one_pass_of_a_sample_alone_is_compared_too(monkeypatch, capsys):
    """A method that is wrong for batches of one sample only is not chosen."""

    def misread(model, parameters, output, samples, consumer, **more):
        columns = gradients_at_once(model, parameters, output, samples, consumer, **more)
        for rows in consumer.rows.values():
            rows *= 1 + (len(columns[0]) == 1)
        return columns

    monkeypatch.setattr(sys.modules[gradient_method.__module__], "gradients_at_once", misread)
    model, batch = nn.Linear(4, 3), (torch.randn(2, 4), torch.tensor([0, 1]))
    method = gradient_method(model, select_parameters(model, None), CLASSIFICATION, batch)
    assert method is gradients_one_by_one
    assert "it differs from autograd by 1 of the largest entry, in " in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "groups"), [(2**28, 1), (4 * 900, 3), (0, 4)])
def test_a_large_gradient_is_never_there_as_a_whole(limit, groups, monkeypatch):
    """Plain autograd differentiates groups of parameters of a limited size."""
    module, grad, n_entries = sys.modules[gradients_one_by_one.__module__], torch.autograd.grad, []

    def noted(f, parameters, **options):
        n_entries.append(sum(p.numel() for p in parameters))
        return grad(f, parameters, **options)

    monkeypatch.setattr(module, "_WHOLE_BYTES", limit)
    model = nn.Sequential(nn.Embedding(40, 20), nn.Flatten(), nn.Linear(20, 30), nn.Linear(30, 3))
    model.unused = nn.Parameter(torch.ones(150))
    parameters = select_parameters(model, None)
    batch = torch.tensor([[7], [9]]), torch.tensor([1, 2])
    expected = formed_gradients(gradients_at_once, model, parameters, CLASSIFICATION, batch)
    monkeypatch.setattr(torch.autograd, "grad", noted)
    found = formed_gradients(gradients_one_by_one, model, parameters, CLASSIFICATION, batch)
    for name, gradients in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradients)
    assert len(n_entries) == 2 * groups
    assert max(n_entries) <= max(limit // 4, 800)
