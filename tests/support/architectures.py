"""Small networks with one special feature each. Make them under float64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

B = 4


def vectors(*shape):
    return lambda: (torch.randn(B, *shape),)


FIVE_NUMBERS = vectors(5)


@dataclass(frozen=True)
class Architecture:
    """A network and its inputs. ``output`` converts its result to a tensor (samples, ...)."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]] = FIVE_NUMBERS
    output: Callable[[Any], torch.Tensor] = lambda returned: returned


def tokens(length=6, size=7):
    return lambda: (torch.randint(0, size, (B, length)),)


def two(*shape):
    return lambda: (torch.randn(B, *(shape or (5,))), torch.randn(B, *(shape or (5,))))


def layers(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


class Net(nn.Module):
    """Modules and parameters by name, and what is done with them."""

    def __init__(self, forward, parts):
        super().__init__()
        for name, make in parts.items():
            setattr(self, name, make())
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def linear(*sizes):
    return lambda: nn.Linear(*sizes)


def weight(*shape):
    return lambda: nn.Parameter(torch.randn(*shape))


def attention(**options):
    return lambda: nn.MultiheadAttention(4, 2, batch_first=True, **options)


def net(forward, inputs=FIVE_NUMBERS, output=lambda returned: returned, **parts):
    """Return an architecture whose forward pass is a function of the network and its inputs."""
    return Architecture(partial(Net, forward, parts), inputs, output)


def convolution(kind, *shape, **options):
    return Architecture(
        layers(lambda: kind(shape[0], 4, 3, **options), nn.Tanh, nn.Flatten), vectors(*shape)
    )


def recurrent(make):
    return net(lambda m, x: m.recurrent(x)[0][:, -1], vectors(3, 3), recurrent=make)


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x)).tanh().mean(1)


class Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale.exp()

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        if float(gradient.abs().sum()) < 0:  # vmap cannot follow this
            raise AssertionError
        return gradient * scale.exp(), (gradient * x * scale.exp()).sum(0)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight, x * weight.sum(1)

    @staticmethod
    def backward(ctx, left, right):
        x, weight = ctx.saved_tensors
        of_weight = x.T @ left + (x * right).sum(0)[:, None]
        return left @ weight.T + right * weight.sum(1), of_weight


class Mixed(torch.autograd.Function):
    """Adds a multiple of the sum of all samples to each."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x + factor * x.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + ctx.factor * gradient.sum(0), None


def frozen():
    """A parameter and a layer are frozen."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def evaluated_batch_norm():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    nn.init.normal_(model[1].weight)
    return model.eval()


def cross_attention(m, x, y):
    return m.attention(x, y, y, need_weights=False)[0].flatten(1)


def token_model(m, x):
    """Class token, positions, attention."""
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embedding(x)], dim=1)
    return m.head(m.layer(x + m.positions)[:, 0])


def relative_positions(m, x):
    """A learned bias for pairs of positions, the same for all samples."""
    place = torch.arange(3)
    bias = m.bias((place[:, None] - place).clamp(-2, 2) + 2).permute(2, 0, 1)
    heads = m.linear(x).unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).flatten(1)


def cell_loop(m, x):
    state = x.new_zeros(len(x), 4)
    for place in x.unbind(1):
        state = m.cell(place, state)
    return state


def windows(m, x):
    """Attention within windows of a rolled image, as in Swin."""
    x = x.roll((1, 1), (1, 2)).unflatten(2, (2, 2)).unflatten(1, (2, 2))
    q, k, v = m.attention(x.transpose(2, 3).flatten(2, 4).flatten(0, 1)).split(4, dim=2)
    x = (q @ k.mT).softmax(-1) @ v
    return m.linear(x.unflatten(0, (-1, 2)).flatten(1, 2)).flip(1)


def rearranged(m, x):
    x = F.pixel_shuffle(m.first(x), 2)
    x = F.unfold(m.second(x).repeat(1, 1, 1, 2), 2, stride=2).transpose(1, 2)
    return m.last(x).topk(2, dim=1).values.flatten(1).index_select(1, torch.arange(3))


def in_place(m, x):
    x = m.first(x)
    x[:, 1] = 2 * x[:, 0]
    x.tanh_()
    return m.second(x).mul_(2)


def columns(m, x):
    """Samples are columns of the hidden layer."""
    hidden = torch.tanh(m.weight @ x.T + m.shift)
    return torch.addmm(m.shift[:2], m.last, hidden, beta=0.5, alpha=2).T


def routed(m, x):
    """Samples go to one of two experts."""
    weights = m.gate(x).softmax(1)
    mixed = x.new_zeros(len(x), 3)
    for i, expert in enumerate(m.experts):
        rows = torch.arange(i, len(x), 2)
        mixed = mixed.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
    return mixed


def experts(m, x):
    """Every token goes to the two of three experts that a router chooses, as in Mixtral."""
    tokens = x.flatten(0, 1)
    scores, chosen = m.router(tokens).softmax(-1).topk(2)
    mixed = torch.zeros_like(tokens)
    for i, weight in enumerate(m.weights):
        rows, places = (chosen == i).nonzero(as_tuple=True)
        hidden = F.linear(tokens[rows], weight).tanh() * scores[rows, places, None]
        mixed.index_add_(0, rows, hidden)
    return m.head(mixed.view_as(x)).flatten(1)


ARCHITECTURES = {
    "linear": Architecture(linear(5, 3)),
    "linear on sequences": Architecture(layers(linear(5, 3), nn.Tanh, linear(3, 2)), vectors(6, 5)),
    "narrow linear on long sequences": Architecture(
        layers(linear(2, 1), nn.Tanh, linear(1, 2)), vectors(50, 2)
    ),
    "tied embedding": Architecture(TiedEmbedding, tokens()),
    "frozen": Architecture(frozen),
    "Conv1d": convolution(nn.Conv1d, 2, 7, padding=1, bias=False),
    "Conv2d": convolution(nn.Conv2d, 2, 7, 7, stride=2, padding=(1, 2), dilation=(2, 1)),
    "Conv2d, one place": convolution(nn.Conv2d, 2, 3, 3),
    "Conv2d, groups": convolution(nn.Conv2d, 4, 5, 5, groups=2, padding="same"),
    "Conv2d, depthwise": convolution(nn.Conv2d, 4, 5, 5, groups=4, stride=2),
    "Conv2d, around the corner": convolution(
        nn.Conv2d, 2, 4, 4, padding=1, padding_mode="circular"
    ),
    "Conv3d": convolution(nn.Conv3d, 1, 4, 4, 3, padding=1),
    "ConvTranspose2d": convolution(nn.ConvTranspose2d, 2, 3, 3, stride=2, output_padding=1),
    "ConvTranspose1d, groups": convolution(
        nn.ConvTranspose1d, 4, 5, groups=2, dilation=2, padding=1
    ),
    "pooling and upsampling": Architecture(
        layers(
            *(lambda: nn.Conv2d(1, 2, 2), lambda: nn.MaxPool2d(2)),
            *(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), nn.Tanh),
            *(lambda: nn.AdaptiveAvgPool2d(2), lambda: nn.Conv2d(2, 2, 1), nn.Flatten),
        ),
        vectors(1, 5, 5),
    ),
    "LayerNorm": Architecture(
        layers(linear(5, 6), lambda: nn.LayerNorm(6), nn.Tanh), vectors(3, 5)
    ),
    "GroupNorm": Architecture(
        layers(lambda: nn.Conv2d(1, 4, 2), lambda: nn.GroupNorm(2, 4), nn.Tanh, nn.Flatten),
        vectors(1, 4, 4),
    ),
    "InstanceNorm": Architecture(
        layers(lambda: nn.Conv2d(1, 3, 2), lambda: nn.InstanceNorm2d(3, affine=True), nn.Tanh),
        vectors(1, 4, 4),
    ),
    "RMSNorm": Architecture(layers(linear(5, 6), lambda: nn.RMSNorm(6))),
    "BatchNorm in evaluation mode": Architecture(evaluated_batch_norm, vectors(2, 4, 4)),
    "PReLU": Architecture(layers(linear(5, 4), lambda: nn.PReLU(4))),
    "embedding": Architecture(
        layers(lambda: nn.Embedding(7, 3, padding_idx=2), nn.Tanh, nn.Flatten), tokens()
    ),
    "bilinear": Architecture(lambda: nn.Bilinear(5, 5, 3), two()),
    "weight norm": Architecture(
        layers(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Tanh)
    ),
    "orthogonal weight": Architecture(
        layers(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)), nn.Tanh)
    ),
    "self-attention": net(
        lambda m, x: m.attention(x, x, x)[0].sum(1), vectors(3, 4), attention=attention()
    ),
    "cross-attention with bias vectors": net(
        cross_attention, two(3, 4), attention=attention(add_bias_kv=True)
    ),
    "RNN": recurrent(lambda: nn.RNN(3, 4, batch_first=True)),
    "LSTM, both ways": recurrent(
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    ),
    "parameter reused": net(lambda m, x: (x @ m.weight).tanh() @ m.weight.T, weight=weight(5, 4)),
    # One operation takes the same parameter twice.
    "parameter squared": net(
        lambda m, x: x * (m.weight * m.weight) + torch.outer(x[:, 0], m.weight), weight=weight(5)
    ),
    "module reused": net(lambda m, x: m.linear(m.linear(x).tanh()), linear=linear(5, 5)),
    "child called and its parameter used": net(
        lambda m, x: m.child(x).tanh() @ m.child.weight, child=linear(5, 5)
    ),
    "scalar parameter": net(
        lambda m, x: m.linear(x) / m.factor,
        factor=lambda: nn.Parameter(torch.tensor(0.7)),
        linear=linear(5, 3),
    ),
    # Each sample has its own row of the parameter.
    "parameter of the batch's shape": net(
        lambda m, x: m.linear(x + m.rows), rows=weight(B, 5), linear=linear(5, 3)
    ),
    # A parameter, a child and an output are unused.
    "unused": net(
        lambda m, x: (m.used(x), m.ignored(x)),
        output=lambda o: o[0],
        weight=weight(3),
        used=linear(5, 3),
        unused=linear(5, 3),
        ignored=linear(5, 3),
    ),
    # Dropout and noise of this forward pass are differentiated.
    "random with parameters": net(
        lambda m, x: F.dropout(x @ m.weight, 0.5) + torch.randn(len(x), 4) * m.weight[0],
        weight=weight(5, 4),
    ),
    "transformer, samples second": net(
        lambda m, x: m.layer(x.transpose(0, 1)).sum(0),
        vectors(3, 4),
        layer=lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
    ),
    "transformer": net(
        lambda m, x, y: m.transformer(x, y).sum(1),
        two(3, 4),
        transformer=lambda: nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True),
    ),
    "token model": net(
        token_model,
        tokens(),
        embedding=lambda: nn.Embedding(7, 4, padding_idx=0),
        positions=weight(1, 7, 4),
        token=weight(1, 1, 4),
        layer=lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True),
        head=linear(4, 3),
    ),
    "relative positions": net(
        relative_positions, vectors(3, 4), bias=lambda: nn.Embedding(5, 2), linear=linear(4, 4)
    ),
    "loop over a cell": net(cell_loop, vectors(3, 3), cell=lambda: nn.GRUCell(3, 4)),
    "rolled windows": net(windows, vectors(4, 4, 4), attention=linear(4, 12), linear=linear(4, 4)),
    "rearranged": net(
        rearranged,
        vectors(1, 3, 3),
        first=lambda: nn.Conv2d(1, 4, 1),
        second=lambda: nn.Conv2d(1, 2, 2),
        last=linear(8, 2),
    ),
    # Several images for each sample, folded into the first dimension.
    "frames": net(
        lambda m, x: m.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean((1, 3)),
        vectors(3, 1, 4, 4),
        layers=layers(lambda: nn.Conv2d(1, 2, 2), lambda: nn.GroupNorm(1, 2), nn.Tanh),
    ),
    "embedding bag": Architecture(lambda: nn.EmbeddingBag(7, 4, mode="sum"), tokens()),
    "user's function": net(
        lambda m, x: Pointwise.apply(m.linear(x), m.scale), scale=weight(4), linear=linear(5, 4)
    ),
    # First one of its outputs is used, then both.
    "user's function of two outputs": net(
        lambda m, x: torch.cat(Both.apply(m.linear(Both.apply(x, m.first)[0]), m.second), dim=1),
        first=weight(5, 5),
        linear=linear(5, 5),
        second=weight(5, 4),
    ),
    # As in mixed precision.
    "copied parameter": net(
        lambda m, x: F.linear(x, m.weight.to(torch.float64, copy=True)), weight=weight(3, 5)
    ),
    "operations without a rule": net(
        lambda m, x: m.second(torch.fft.rfft(m.first(x)).abs().repeat(1, 2)[:, :6]),
        first=linear(5, 6),
        second=linear(6, 3),
    ),
    "einsum": net(
        lambda m, x: torch.einsum("bi,ijk,bk->bj", x, m.weight, x[:, :2]), weight=weight(5, 3, 2)
    ),
    "in place": net(in_place, first=linear(5, 4), second=linear(4, 3)),
    "samples reversed": net(
        lambda m, x: m.second(m.first(x.flip(0)).tanh().flip(0)),
        first=linear(5, 4),
        second=linear(4, 3),
    ),
    "samples as columns": net(columns, weight=weight(3, 5), shift=weight(3, 1), last=weight(2, 3)),
    "routed samples": net(
        routed, gate=linear(5, 2), experts=lambda: nn.ModuleList([nn.Linear(5, 3) for _ in "ab"])
    ),
    "experts": net(
        experts, vectors(5, 4), router=linear(4, 3), weights=weight(3, 4, 4), head=linear(4, 2)
    ),
    "user's functions that mix samples": net(
        lambda m, x: Mixed.apply(m.second(Mixed.apply(m.first(x), 1.0)), -1 / (1 + len(x))).tanh(),
        first=linear(5, 4),
        second=lambda: nn.Linear(4, 3, bias=False),
    ),
    "recomputed": net(
        lambda m, x: m.last(checkpoint(m.inner, x, use_reentrant=False)),
        inner=layers(linear(5, 4), nn.Tanh),
        last=linear(4, 3),
    ),
    # As rotary positions that rotate all of a head.
    "empty part": net(
        lambda m, x: torch.cat([(y := m.linear(x))[:, :3].tanh(), y[:, 3:]], dim=1),
        linear=linear(5, 3),
    ),
    # The mean has channels-last strides.
    "pooled, channels last": net(
        lambda m, x: F.adaptive_avg_pool2d(m.linear(x).permute(0, 3, 1, 2), 1).flatten(1).tanh(),
        vectors(2, 2, 5),
        linear=linear(5, 3),
    ),
    # One entry of each sample.
    "picked by index": net(
        lambda m, x: m.linear(x).log_softmax(1)[torch.arange(len(x)), torch.arange(len(x)) % 3],
        output=lambda o: o.unsqueeze(1),
        linear=linear(5, 3),
    ),
}
