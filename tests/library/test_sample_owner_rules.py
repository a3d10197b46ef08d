"""Rules for operations that exist only on a GPU, tested by CPU operations of the same name."""

import torch
from architectures import Net
from torch import nn

from trak_core.gradients import (
    as_batch,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.model_outputs.supervised import CLASSIFICATION


class ScaledDotProductEfficientAttention(torch.autograd.Function):
    """Has the name of a GPU kernel, which takes a trained bias too."""

    @staticmethod
    def forward(ctx, q, k, v, bias):
        weights = (q @ k.mT + bias).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, up):
        q, k, v, weights = ctx.saved_tensors
        onto = up @ v.mT
        onto = weights * (onto - (onto * weights).sum(-1, keepdim=True))
        return onto @ k, onto.mT @ q, weights.mT @ up, onto


def test_a_bias_that_a_kernel_of_attention_takes_belongs_to_its_sample():
    def attended(m, x):
        q, k, v = m.inner(x).view(len(x), 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        bias = m.bias.weight.view(2, 5, 5).expand(len(x), -1, -1, -1)
        mixed = ScaledDotProductEfficientAttention.apply(q, k, v, bias)
        return m.head(mixed.transpose(1, 2).flatten(1))

    parts = {"bias": lambda: nn.Embedding(10, 5), "head": lambda: nn.Linear(40, 3)}
    model = Net(attended, {"inner": lambda: nn.Linear(6, 24), **parts})
    samples = torch.randn(4, 5, 6), torch.tensor([0, 2, 1, 1])
    given = model, select_parameters(model, None), CLASSIFICATION, as_batch(samples, CLASSIFICATION)
    assert gradient_method(*given) is gradients_at_once
    at_once, one_by_one = (
        formed_gradients(method, *given).gradients
        for method in (gradients_at_once, gradients_one_by_one)
    )
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-6)
