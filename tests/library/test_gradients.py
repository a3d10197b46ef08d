"""Per-sample gradients against one backward pass a sample, their methods, and refused models."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from architectures import Net
from gramians import by_autograd
from refused import refused
from torch import nn

from trak_core.gradients import as_batch, formed_gradients, gradient_method, model_inputs
from trak_core.gradients.batch_size import sample_memory
from trak_core.gradients.check_gradients import (
    check_samples_apart,
    count_classes,
    explain_not_finite,
)
from trak_core.gradients.choose_method import choose_method
from trak_core.gradients.differentiable_model import n_params, select_parameters
from trak_core.gradients.gradient_methods import (
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
)
from trak_core.model_outputs.supervised import CLASSIFICATION

CPU = torch.device("cpu")
METHODS = [gradients_at_once, gradients_one_by_one]


def classified(*inputs):
    """Add labels of three classes to five samples or more."""
    return (*inputs, torch.tensor([0, 1, 2, 2, 0, 1])[: len(inputs[0])])


def formed(method, model, batch):
    return formed_gradients(method, model, select_parameters(model, None), CLASSIFICATION, batch)


def chosen(model, batch):
    return gradient_method(model, select_parameters(model, None), CLASSIFICATION, batch)


def linear(forward, **parts):
    return Net(forward, {"linear": lambda: nn.Linear(4, 3), **parts})


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, mask):
        hidden = self.layer(self.embedding(tokens))
        return self.head((hidden * mask.unsqueeze(-1)).sum(1))


def conv_net():
    convolution = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()
    return nn.Sequential(*convolution, nn.Dropout(), nn.Flatten(), nn.Linear(48, 3))


CASES = {
    "linear": (lambda: nn.Linear(4, 3), lambda: (torch.randn(5, 4),)),
    "BatchNorm and dropout": (conv_net, lambda: (torch.randn(5, 1, 6, 6),)),
    "attention": (Attention, lambda: (torch.randint(0, 11, (5, 7)), torch.ones(5, 7))),
    "object with logits": (
        lambda: linear(lambda m, x: SimpleNamespace(logits=m.linear(x))),
        lambda: (torch.randn(5, 4),),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_evaluated_and_left_as_it_was(method, training):
    """Dropout is off and BatchNorm's statistics are fixed, whatever mode the model is in."""
    model, batch = conv_net().train(training), classified(torch.randn(5, 1, 6, 6))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    result = formed(method, model, batch)
    check_samples_apart(model, CLASSIFICATION, batch)
    count_classes(model, CLASSIFICATION, batch, CPU)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training == training for module in model.modules())
    _, values = by_autograd(model, CLASSIFICATION, batch[:-1], batch[-1])
    torch.testing.assert_close(result.outputs, values)


def test_a_model_may_write_into_its_inputs():
    def centre(model, x):
        x -= 0.5
        return model.linear(x)

    x = torch.tensor([[1.0, 1, 1], [-1, 0, 2], [1, -3, 0], [2, 2, 2]])
    batch = (x.clone(), torch.tensor([0, 1, 2, 3]))
    model = Net(centre, {"linear": lambda: nn.Linear(3, 4)})
    count_classes(model, CLASSIFICATION, batch, CPU)
    sample_memory(model, select_parameters(model, None), CLASSIFICATION, batch)
    check_samples_apart(model, CLASSIFICATION, batch)
    assert chosen(model, batch) is gradients_at_once
    at_once, one_by_one = (formed(method, model, batch) for method in METHODS)
    torch.testing.assert_close(at_once.gradients, one_by_one.gradients)
    assert torch.equal(batch[0], x)


HEAD = {"head": lambda: nn.Linear(3, 3)}
RECURRENT = {"lstm": lambda: nn.LSTM(3, 5, batch_first=True), "head": lambda: nn.Linear(5, 3)}


@pytest.mark.parametrize("method", [gradients_in_turn, gradients_one_by_one])
def test_what_one_pass_cannot_take_goes_one_by_one(method, monkeypatch, capsys):
    """By factors if the model is large, or the consumer reads factors."""
    model = linear(lambda m, x: m.head(m.lstm(m.linear(x))[0][:, -1]), **RECURRENT)
    batch, parameters = classified(torch.randn(5, 6, 4)), select_parameters(model, None)
    least = n_params(parameters) + (method is gradients_one_by_one)
    monkeypatch.setattr(sys.modules[choose_method.__module__], "_LEAST_PARAMETERS", least)
    assert chosen(model, batch) is method
    given = model, parameters, CLASSIFICATION, batch
    assert choose_method(*given, reads_terms=True)[0] is gradients_in_turn
    said = "it cannot tell samples apart in these operations: MkldnnRnnLayer"
    assert said in capsys.readouterr().out
    result = formed(method, model, batch)
    expected, values = by_autograd(model, CLASSIFICATION, batch[:-1], batch[-1])
    torch.testing.assert_close(result.outputs, values)
    torch.testing.assert_close(result.gradients, expected)


def test_a_batch_whose_graph_can_not_be_read_goes_one_by_one(capsys):
    """A hook that the user registered after the choice changes gradients as in autograd."""
    model, batch = linear(lambda m, x: m.head(m.linear(x)), **HEAD), classified(torch.randn(5, 4))
    assert chosen(model, batch) is gradients_at_once
    model.head.weight.register_hook(lambda gradient: 2 * gradient)
    expected = formed(gradients_one_by_one, model, batch).gradients
    assert not capsys.readouterr().out
    for method in (gradients_at_once, gradients_in_turn):
        torch.testing.assert_close(formed(method, model, batch).gradients, expected, rtol=0, atol=0)
    reason = "has backward hooks on parameters or modules"
    said = f"one backward pass cannot compute the gradients of a batch, because the model {reason}"
    assert said in capsys.readouterr().out


def grouped(m, x):
    """A mixture of experts: tokens are sorted by the two experts that a router chooses."""
    tokens = x.flatten(0, 1)
    scores, chosen = m.router(tokens).softmax(-1).topk(2)
    order = chosen.flatten().argsort(stable=True)
    ends = nn.functional.one_hot(chosen.flatten(), 3).sum(0).cumsum(0).int()
    hidden = nn.functional.grouped_mm(tokens[order // 2], m.weights, offs=ends)
    hidden = (hidden.tanh() * scores.flatten()[order, None])[order.argsort()]
    return m.linear(hidden.view(-1, 2, 4).sum(1).view_as(x).mean(1))


def test_experts_by_grouped_products(capsys):
    parts = {
        "router": lambda: nn.Linear(4, 3),
        "weights": lambda: nn.Parameter(torch.randn(3, 4, 4)),
    }
    model, batch = linear(grouped, **parts), classified(torch.randn(5, 6, 4))
    assert chosen(model, batch) is gradients_at_once
    assert not capsys.readouterr().out
    expected, _ = by_autograd(model, CLASSIFICATION, batch[:-1], batch[-1])
    for method in (gradients_at_once, gradients_in_turn):
        torch.testing.assert_close(
            formed(method, model, batch).gradients, expected, rtol=1e-4, atol=1e-5
        )


def centred(m, x):
    hidden = m.linear(x)
    return m.second(hidden - hidden.mean(0))


class AlwaysDropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)


WITHOUT = {"track_running_stats": False}
DIFFERS = re.compile(r"its output differs by up to [\d.e-]+")
FAILS = re.compile(r"the model fails: Expected more than 1 value [^;]*")
MIXING = {
    "BatchNorm without statistics": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2, **WITHOUT), nn.Flatten()),
        *("mixed_samples", DIFFERS, "1 (BatchNorm1d)"),
    ),
    "BatchNorm that fails for one sample": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3, **WITHOUT))),
        *("mixed_samples", FAILS, "1.0 (BatchNorm1d)"),
    ),
    "softmax over the batch": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(dim=0)),
        *("mixed_samples", DIFFERS, "1 (Softmax)"),
    ),
    "code between layers": (
        lambda: linear(centred, second=lambda: nn.Linear(3, 3)),
        *("mixed_samples", DIFFERS, "the code that calls second (Linear)"),
    ),
    "randomness": (
        lambda: nn.Sequential(nn.Linear(4, 8), AlwaysDropping(), nn.Linear(8, 3)),
        *("random_model", "1 (AlwaysDropping)"),
    ),
    "one row for all": (
        lambda: nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (1, -1)), nn.Linear(24, 3)),
        *("model_rows", "1 rows", "batch of 6"),
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_is_no_function_of_one_sample_is_refused(name):
    make, code, *values = MIXING[name]
    with refused(f"gradients.{code}", *values):
        check_samples_apart(make(), CLASSIFICATION, classified(torch.randn(6, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_keeps_samples_apart_passes(name, dtype):
    make, inputs = CASES[name]
    batch = [x.to(dtype) if x.is_floating_point() else x for x in inputs()]
    check_samples_apart(make().to(dtype), CLASSIFICATION, classified(*batch))


def test_half_precision_may_differ_by_its_rounding():
    def autocast(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.net(x).float()

    wide = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 5))
    model, batch = Net(autocast, {"net": lambda: wide}), (torch.randn(8, 40), torch.arange(8) % 5)
    check_samples_apart(model, CLASSIFICATION, batch)
    for net, bound in ((model, 2**-3.5), (wide, 2**-11.5)):
        assert model_inputs.call_with_rounding(net, as_batch(batch, CLASSIFICATION))[1] == bound
    assert chosen(model, batch) is gradients_at_once


def test_bad_values_are_left_for_the_check_of_gradients():
    model, batch = nn.Linear(4, 3), classified(torch.randn(3, 4))
    batch[0][0, 0] = torch.nan
    check_samples_apart(model, CLASSIFICATION, batch)
    parameters = select_parameters(model, None)
    with refused("gradients.not_finite", "samples 0", "in the model output itself, weight, bias"):
        explain_not_finite(model, parameters, CLASSIFICATION, batch, range(3))


def test_a_model_output_without_a_graph_is_refused():
    def detached(m, x):
        with torch.no_grad():
            return m.linear(x)

    model, batch = linear(detached), classified(torch.randn(5, 4))
    with refused("gradients.no_graph"):
        chosen(model, batch)
    for method in METHODS:
        with refused("gradients.no_graph"):
            formed(method, model, batch)


def test_parameters_without_entries():
    model = nn.Linear(3, 2)
    model.none, model.no_rows = nn.Parameter(torch.ones(2, 0)), nn.Parameter(torch.ones(0, 2))
    forward = model.forward
    model.forward = lambda x: forward(x) + model.none.sum() + model.no_rows.sum()
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))
    assert chosen(model, batch) is gradients_at_once
    for method in METHODS:
        result = formed(method, model, batch)
        assert result.gradients["none"].shape == (4, 2, 0)
        assert result.gradients["weight"].any()


def test_what_is_not_finite_is_named():
    parts = {name: lambda: nn.Parameter(torch.zeros(())) for name in "ab"}
    net = Net(lambda m, x: torch.stack([m.a * x, (m.b + x).sqrt(), 0 * x], dim=-1), parts)
    labels, parameters = torch.tensor([0, 0, 0]), dict(net.named_parameters())
    for x, ids, names in (
        ([1.0, 2.0, 3.0], "", ""),
        ([1.0, 0.0, 3.0], "y", "b"),
        ([1.0, 0.0, torch.nan], "y, z", "the model output itself, a, b"),
    ):
        given = net, parameters, CLASSIFICATION, (torch.tensor(x), labels), ["x", "y", "z"]
        if not ids:
            explain_not_finite(*given)
            continue
        with refused("gradients.not_finite", f"samples {ids} in {names}"):
            explain_not_finite(*given)


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
        found = formed_gradients(method, *given).gradients
        torch.testing.assert_close(found, by_autograd(model, CLASSIFICATION, [images], labels)[0])


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
