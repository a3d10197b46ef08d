"""The noise of each loss has the loss's Hessian as its covariance."""

import itertools

import pytest
import torch
from torch import nn

from trak_core.model_outputs.about_outputs import TABLE

# Shape of a sample's logits, its labels, and its training loss by torch.
LOSSES = {
    "image_classification": ((5,), 2, nn.functional.cross_entropy),
    "language_modelling": (
        (4, 5),
        [1, 3, -100, 2],
        lambda z, y: nn.functional.cross_entropy(z[:-1], y[1:], reduction="sum"),
    ),
    "masked_language_modelling": (
        (4, 5),
        [1, -100, 0, 2],
        lambda z, y: nn.functional.cross_entropy(z, y, reduction="sum"),
    ),
    "segmentation": (
        (3, 2, 2),
        [[0, 2], [-100, 1]],
        lambda z, y: nn.functional.cross_entropy(z[None], y[None]),
    ),
    "multi_label": (
        (3,),
        [1, -100, 0],
        lambda z, y: nn.functional.binary_cross_entropy_with_logits(
            z[y >= 0], y[y >= 0].double(), reduction="sum"
        ),
    ),
    "regression": ((1,), 0.3, lambda z, y: (z - y).square().sum() / 2),
}
ALIKE = {
    "text_classification": "image_classification",
    "sequence_to_sequence": "masked_language_modelling",
    "token_log_odds": "language_modelling",
}


def test_the_table_names_the_losses_with_noise():
    assert {name for name, row in TABLE.items() if row.has_loss_noise} == {*LOSSES, *ALIKE}


def with_probability(name, z, y):
    """Numbers that draw each value of each part of a label, with the value's probability."""
    if name == "regression":
        return [[(0.25, 0.5), (0.75, 0.5)]]
    if name == "multi_label":
        p = z.sigmoid().tolist()
        pairs = [[(q / 2, q), ((1 + q) / 2, 1 - q)] for q in p]
    else:
        p = z.movedim(0, -1) if name == "segmentation" else z
        p = p.softmax(-1).reshape(-1, p.shape[-1])
        if name == "language_modelling":
            p = torch.cat([p[-1:], p[:-1]])  # logits predict the next token
        pairs = [
            list(zip((row.cumsum(0) - row / 2).tolist(), row.tolist(), strict=True)) for row in p
        ]
    is_used = (y.flatten() != -100).tolist()
    if name == "language_modelling":
        is_used[0] = False
    return [pair if used else [(0.5, 1)] for pair, used in zip(pairs, is_used, strict=True)]


@pytest.mark.parametrize("name", [*LOSSES, *ALIKE])
def test_the_noise_of_a_loss_has_its_hessian_as_covariance(name):
    """By an enumeration of all labels that can be drawn."""
    kind = ALIKE.get(name, name)
    shape, label, loss = LOSSES[kind]
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, output = torch.tensor(label), TABLE[name].load()
    draws = list(itertools.product(*with_probability(kind, z, y)))
    uniform = torch.tensor([[u for u, _ in draw] for draw in draws]).reshape(-1, *y.shape)
    weights = torch.tensor([[p for _, p in draw] for draw in draws], dtype=torch.float64).prod(1)
    noise = torch.vmap(output.loss_noise, in_dims=(None, None, 0))(z, y, uniform)
    assert noise.shape == (len(draws), *shape)
    rows = noise.flatten(1)
    hessian = torch.autograd.functional.hessian(lambda x: loss(x, y), z)
    covariance = rows.T @ (weights[:, None] * rows)
    torch.testing.assert_close(covariance, hessian.reshape(covariance.shape))
    torch.testing.assert_close(weights @ rows, torch.zeros(z.numel(), dtype=torch.float64))
