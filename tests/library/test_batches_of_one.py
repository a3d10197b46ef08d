"""Batches of one sample, and the choice between methods that disagree."""

import sys
from functools import partial

import pytest
import torch
from architectures import Net
from differences import by_differences
from gramians import gramian_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from trak_core.compat.gradient_computers import FunctionalGradientComputer
from trak_core.compat.modelout_functions import ImageClassificationModelOutput
from trak_core.gradients import (
    formed_gradients,
    gradient_method,
    gradients_at_once,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.model_outputs.supervised import CLASSIFICATION


class OwnTask(ImageClassificationModelOutput):
    """Computed by ``torch.vmap``, because a subclass may compute anything."""


METHODS = [gradients_at_once, gradients_one_by_one]


def as_tokens(m, x):
    """Normalizes an image and reads it as tokens: its gradient has the channels last."""
    return m.head(m.norm(m.conv(x)).flatten(2).transpose(1, 2).mean(1).tanh())


def of_tokens(m, x):
    """Normalizes tokens as an image one pixel wide: the image has the channels last."""
    tokens = m.conv(x).flatten(2).transpose(1, 2).contiguous()
    return m.head(m.norm(tokens.transpose(1, 2).unsqueeze(-1)).mean((2, 3)).tanh())


def checkpointed(m, x):
    """Recomputes the normalization in the backward pass."""
    image = checkpoint(m.norm, m.conv(x), use_reentrant=False)
    return m.head(image.flatten(2).transpose(1, 2).mean(1).tanh())


MODELS = {
    "BatchNorm2d": (as_tokens, nn.Conv2d, nn.BatchNorm2d),
    "BatchNorm3d": (as_tokens, nn.Conv3d, nn.BatchNorm3d),
    "InstanceNorm2d": (as_tokens, nn.Conv2d, partial(nn.InstanceNorm2d, affine=True)),
    "one pixel wide": (of_tokens, nn.Conv2d, nn.BatchNorm2d),
    "checkpointed": (checkpointed, nn.Conv2d, nn.BatchNorm2d),
}


@pytest.fixture(params=MODELS)
def normalizing(request):
    forward, conv, norm = MODELS[request.param]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    parts = {
        "conv": lambda: conv(1, 4, 1),
        "norm": lambda: norm(4),
        "head": lambda: nn.Linear(4, 3),
    }
    model = Net(forward, parts).eval()
    for tensor in (model.norm.weight, getattr(model.norm, "running_mean", None)):
        if tensor is not None:
            nn.init.normal_(tensor)
    sizes = (3, 2, 2) if conv is nn.Conv3d else (3, 2)
    yield model, torch.randn(3, 1, *sizes), torch.tensor([0, 2, 1])
    torch.set_default_dtype(torch.float32)


def test_layers_whose_gradient_torch_misreads(normalizing, capsys):
    model, images, labels = normalizing
    parameters = select_parameters(model, None)
    expected = by_differences(model, images, labels)
    method = gradient_method(model, parameters, CLASSIFICATION, (images, labels))
    assert method is gradients_at_once
    assert not capsys.readouterr().out
    for n in (1, 3):
        batch = images[:n], labels[:n]
        own = {name: rows[:n] for name, rows in expected.items()}
        given = model, parameters, CLASSIFICATION, batch
        found = [formed_gradients(one, *given).gradients for one in (method, *METHODS[1:])]
        for gradients in found:
            torch.testing.assert_close(gradients, own, rtol=1e-6, atol=1e-8)
        by_vmap = FunctionalGradientComputer(model, OwnTask()).compute_per_sample_grad(batch)
        torch.testing.assert_close(by_vmap, own, rtol=1e-6, atol=1e-8)
        flat = torch.cat([rows.flatten(1) for rows in own.values()], dim=1)
        gramian = gramian_of(model, parameters, CLASSIFICATION, batch)
        torch.testing.assert_close(gramian, flat @ flat.T, rtol=1e-6, atol=1e-8)


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
    "one pass is wrong": (
        scaled(lambda n: 1 + (n > 1)),
        gradients_one_by_one,
        "it differs from autograd by 1 of the largest entry, in linear.",
        "and in float64 by 1, in linear.",
        "one sample at a time, which gives the same numbers but is slower.",
    ),
    "rounding": (*(kinked, gradients_at_once, "in float64 by 0, so that rounding is the cause."),),
    "lost digits": (
        *(lossy, gradients_one_by_one),
        *("in linear.weight, and in float64 by ", "Gradients are computed"),
    ),
}


@pytest.mark.parametrize("name", DISAGREEING)
def test_plain_autograd_decides_where_ways_disagree(name, capsys):
    forward, expected, *said = DISAGREEING[name]
    torch.manual_seed(0)
    parts = {"linear": lambda: nn.Linear(4, 4), "head": lambda: nn.Linear(4, 3)}
    model, images = Net(forward, parts), torch.randn(3, 4)
    parameters, labels = select_parameters(model, None), torch.tensor([0, 2, 1])
    method = gradient_method(model, parameters, CLASSIFICATION, (images, labels))
    notice = capsys.readouterr().out
    assert method is expected
    assert all(words in notice for words in said), notice
    if method is gradients_one_by_one:
        found = formed_gradients(method, model, parameters, CLASSIFICATION, (images, labels))
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
