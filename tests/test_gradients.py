import pytest
import torch
from torch import nn

from trak_core.errors import InputError
from trak_core.gradients import (
    PerSample,
    check_finite,
    check_labels,
    count_classes,
    n_params,
    per_sample_gradients,
    select_parameters,
)
from trak_core.model_outputs import MODEL_OUTPUTS

CLASSIFICATION, REGRESSION = MODEL_OUTPUTS["image_classification"], MODEL_OUTPUTS["regression"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens, mask):
        hidden = self.layer(self.embedding(tokens))
        return self.head((hidden * mask.unsqueeze(-1)).sum(1))


class Wrapped(nn.Module):
    """Returns an object with logits, as transformers' models do."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.Output(self.linear(x))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


CASES = {
    "linear": (lambda: nn.Linear(4, 3), lambda: (torch.randn(5, 4),)),
    "BatchNorm and dropout": (conv_net, lambda: (torch.randn(5, 1, 6, 6),)),
    "attention, two inputs": (
        Attention,
        lambda: (torch.randint(0, 11, (5, 7)), torch.ones(5, 7)),
    ),
    "object with logits": (Wrapped, lambda: (torch.randn(5, 4),)),
}


def by_backward(model, batch, output):
    """One forward and one backward pass a sample."""
    rows, values = [], []
    for i in range(len(batch[-1])):
        model.zero_grad()
        outputs = model(*(x[i : i + 1] for x in batch[:-1]))
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        value = output.value(logits[0], batch[-1][i])
        value.backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
        values.append(value.detach())
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, torch.stack(values)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_backward_pass_a_sample(name):
    make, inputs = CASES[name]
    model, batch = make().eval(), (*inputs(), torch.tensor([0, 1, 2, 2, 0]))
    expected, values = by_backward(model, batch, CLASSIFICATION)
    found = per_sample_gradients(model, select_parameters(model, None), CLASSIFICATION, batch)
    assert list(found.gradients) == list(expected)
    torch.testing.assert_close(found.outputs, values)
    for key, gradient in expected.items():
        torch.testing.assert_close(found.gradients[key], gradient, rtol=1e-4, atol=1e-5)


def test_a_batch_gives_what_its_samples_give():
    model = conv_net().eval()
    batch = (torch.randn(6, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2]))
    parameters = select_parameters(model, None)
    whole = per_sample_gradients(model, parameters, CLASSIFICATION, batch)
    for i in range(6):
        part = [tensor[i : i + 1] for tensor in batch]
        single = per_sample_gradients(model, parameters, CLASSIFICATION, part)
        for key, gradient in single.gradients.items():
            torch.testing.assert_close(gradient[0], whole.gradients[key][i])


def test_only_chosen_parameters_are_differentiated():
    model = conv_net().eval()
    parameters = select_parameters(model, ["5.*", "0.bias"])
    assert list(parameters) == ["0.bias", "5.weight", "5.bias"]
    assert n_params(parameters) == 3 + 144 + 3
    batch = (torch.randn(5, 1, 6, 6), torch.tensor([0, 1, 2, 2, 0]))
    found = per_sample_gradients(model, parameters, CLASSIFICATION, batch)
    expected, _ = by_backward(model, batch, CLASSIFICATION)
    assert list(found.gradients) == list(parameters)
    for key in parameters:
        torch.testing.assert_close(found.gradients[key], expected[key], rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_it_was():
    model = conv_net().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    batch = (torch.randn(5, 1, 6, 6), torch.tensor([0, 1, 2, 2, 0]))
    per_sample_gradients(model, select_parameters(model, None), CLASSIFICATION, batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    assert list(select_parameters(model, None)) == ["1.weight", "1.bias"]
    with pytest.raises(InputError, match=r"'0\.\*', which matches none of 1\.weight, 1\.bias"):
        select_parameters(model, ["0.*"])
    model.requires_grad_(False)
    with pytest.raises(InputError, match="Found none"):
        select_parameters(model, None)


def test_regression_gradient():
    model = nn.Linear(3, 1)
    x, y = torch.randn(4, 3), torch.randn(4)
    found = per_sample_gradients(model, select_parameters(model, None), REGRESSION, (x, y))
    torch.testing.assert_close(found.gradients["weight"], x.unsqueeze(1))
    torch.testing.assert_close(found.outputs, model(x).squeeze(1).detach())


def test_what_is_not_finite_is_named():
    gradients = {"a": torch.zeros(3, 2), "b": torch.zeros(3, 2, 2)}
    good = PerSample(gradients, *[torch.zeros(3)] * 4)
    check_finite(good, ["x", "y", "z"])
    gradients["b"][1, 0, 1] = torch.inf
    with pytest.raises(InputError, match=r"samples y in b\."):
        check_finite(good, ["x", "y", "z"])
    good.outputs[2] = torch.nan
    with pytest.raises(InputError, match=r"samples y, z in the model output itself, b\."):
        check_finite(good, ["x", "y", "z"])


@pytest.mark.parametrize(
    ("labels", "n_classes", "message"),
    [
        (torch.tensor([0, 3]), 3, "Found 3 in sample b"),
        (torch.tensor([0, -1]), 3, "integers from 0 to 2"),
        (torch.tensor([0.0, 1.0]), 3, "Found torch.float32"),
        (torch.tensor([True, False]), 3, "Found torch.bool"),
        (torch.tensor([0.0, torch.inf]), None, "finite numbers"),
        (torch.tensor([[0], [1]]), 3, r"shape \(2, 1\)"),
    ],
)
def test_bad_labels(labels, n_classes, message):
    with pytest.raises(InputError, match=message):
        output = REGRESSION if n_classes is None else CLASSIFICATION
        check_labels(labels, output, n_classes, ["a", "b"])


def test_counting_classes():
    batch = (torch.zeros(2, 4), torch.tensor([0, 1]))
    assert count_classes(nn.Linear(4, 3), CLASSIFICATION, batch, torch.device("cpu")) == 3
    assert count_classes(Wrapped(), CLASSIFICATION, batch, torch.device("cpu")) == 3
    with pytest.raises(InputError, match=r"shapes \(1, 4\) failed"):
        count_classes(nn.Linear(5, 3), CLASSIFICATION, batch, torch.device("cpu"))
