"""Small networks with one quirk each, for the Gramian engine. Make them under float64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

B = 4


@dataclass(frozen=True)
class Architecture:
    """How to make it and call it; ``output`` turns what it returns into a tensor, samples first.

    ``peer`` holds the values of batch_dim for which torchjd's engine accepts it and means the same.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    output: Callable[[Any], torch.Tensor] = lambda found: found
    peer: tuple[int | None, ...] = (None, 0)


def vectors(*shape):
    return lambda: (torch.randn(B, *(shape or (5,))),)


def tokens(length=6, size=7):
    return lambda: (torch.randint(0, size, (B, length)),)


def two(*shape):
    return lambda: (torch.randn(B, *(shape or (5,))), torch.randn(B, *(shape or (5,))))


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


def layers(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


def frozen():
    """One parameter, and all of a layer that gradients pass through."""
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


def convolution(kind, *shape, **options):
    return Architecture(
        layers(lambda: kind(shape[0], 4, 3, **options), nn.Tanh, nn.Flatten), vectors(*shape)
    )


ALONE = {"peer": ()}


ARCHITECTURES = {
    "linear": Architecture(lambda: nn.Linear(5, 3), vectors()),
    "linear on sequences": Architecture(
        layers(lambda: nn.Linear(5, 3), nn.Tanh, lambda: nn.Linear(3, 2)), vectors(6, 5)
    ),
    "narrow linear on long sequences": Architecture(
        layers(lambda: nn.Linear(2, 1), nn.Tanh, lambda: nn.Linear(1, 2)), vectors(50, 2)
    ),
    "tied embedding": Architecture(TiedEmbedding, tokens(), **ALONE),
    "frozen": Architecture(frozen, vectors()),
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
        layers(lambda: nn.Linear(5, 6), lambda: nn.LayerNorm(6), nn.Tanh), vectors(3, 5)
    ),
    "GroupNorm": Architecture(
        layers(lambda: nn.Conv2d(1, 4, 2), lambda: nn.GroupNorm(2, 4), nn.Tanh, nn.Flatten),
        vectors(1, 4, 4),
    ),
    "InstanceNorm": Architecture(
        layers(lambda: nn.Conv2d(1, 3, 2), lambda: nn.InstanceNorm2d(3, affine=True), nn.Tanh),
        vectors(1, 4, 4),
    ),
    "RMSNorm": Architecture(layers(lambda: nn.Linear(5, 6), lambda: nn.RMSNorm(6)), vectors(5)),
    "BatchNorm in evaluation mode": Architecture(evaluated_batch_norm, vectors(2, 4, 4), **ALONE),
    "PReLU": Architecture(layers(lambda: nn.Linear(5, 4), lambda: nn.PReLU(4)), vectors()),
    "embedding": Architecture(
        layers(lambda: nn.Embedding(7, 3, padding_idx=2), nn.Tanh, nn.Flatten), tokens()
    ),
    "bilinear": Architecture(lambda: nn.Bilinear(5, 5, 3), two()),
    "weight norm": Architecture(
        layers(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), nn.Tanh),
        vectors(),
        **ALONE,
    ),
    "orthogonal weight": Architecture(
        layers(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 3)), nn.Tanh),
        vectors(),
        **ALONE,
    ),
}


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


def row(name, inputs, *, kwargs=dict, output=lambda found: found, peer=(None, 0), **parts):
    """Make a function of a network and its inputs an architecture; ``parts`` make the network."""

    def keep(forward):
        make = partial(Net, forward, parts)
        ARCHITECTURES[name] = Architecture(make, inputs, kwargs, output, peer)
        return forward

    return keep


@row(
    "nested containers",
    lambda: ({"a": [torch.randn(B, 5), {"b": torch.randn(B, 5)}]},),
    kwargs=lambda: {"shift": torch.randn(B, 3), "factor": 3.0, "nothing": None},
    output=lambda o: o["sum"][0] + o["rest"][0],
    left=linear(5, 3),
    right=linear(5, 3),
)
def nested_containers(m, tree, *, shift, factor, nothing):
    """Takes and returns them, and things that aren't tensors, by keyword."""
    assert nothing is None
    a = m.left(tree["a"][0]) + shift
    return {"sum": [a + m.right(tree["a"][1]["b"]) * factor], "rest": (a, 7)}


@row("side effects", vectors(), peer=(), weight=weight(5, 3), calls=lambda: [])
def side_effects(m, x):
    """Counts its calls, and its output depends on the count."""
    m.calls.append(1)
    return (x @ m.weight) ** (1 + len(m.calls))


def attention(**options):
    return lambda: nn.MultiheadAttention(4, 2, batch_first=True, **options)


@row("self-attention", vectors(3, 4), attention=attention())
def self_attention(m, x):
    return m.attention(x, x, x)[0].sum(1)


@row("cross-attention with bias vectors", two(3, 4), attention=attention(add_bias_kv=True))
@row(
    "cross-attention of other widths",
    lambda: (torch.randn(B, 3, 4), torch.randn(B, 2, 5)),
    attention=attention(kdim=5, vdim=5),
)
def cross_attention(m, x, y):
    return m.attention(x, y, y, need_weights=False)[0].flatten(1)


@row("RNN", vectors(3, 3), peer=(None,), recurrent=lambda: nn.RNN(3, 4, batch_first=True))
@row(
    "LSTM, both ways",
    vectors(3, 3),
    peer=(None,),
    recurrent=lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
)
def recurrent(m, x):
    return m.recurrent(x)[0][:, -1]


@row("residual of two inputs", two(), first=linear(5, 5), second=linear(5, 5))
def residual(m, x, y):
    x = x + m.first(x).tanh()
    return x + m.second(y) * x


@row("branches", vectors(), stem=linear(5, 4), left=linear(4, 3), right=linear(4, 2))
def branches(m, x):
    x = m.stem(x).sigmoid()
    return torch.cat([m.left(x), m.right(x.square())], dim=1)


@row("parameter reused", vectors(), weight=weight(5, 4))
def reused_parameter(m, x):
    return (x @ m.weight).tanh() @ m.weight.T


@row("parameter squared", vectors(), weight=weight(5))
def squared_parameter(m, x):
    """One operation takes the same parameter twice."""
    return x * (m.weight * m.weight) + torch.outer(x[:, 0], m.weight)


@row("module reused", vectors(), peer=(0,), linear=linear(5, 5))
def reused_module(m, x):
    return m.linear(m.linear(x).tanh())


@row("child called and its parameter used", vectors(), peer=(), child=linear(5, 5))
def called_and_used(m, x):
    """Calls a child and uses its parameter as well."""
    return m.child(x).tanh() @ m.child.weight


@row("own parameters and children", vectors(), scale=weight(5), shift=weight(3), child=linear(5, 3))
def own_and_children(m, x):
    """Direct parameters before, between and behind children."""
    return (m.shift - m.child(x * m.scale)).tanh() - 2 * m.shift


@row(
    "scalar parameter",
    vectors(),
    factor=lambda: nn.Parameter(torch.tensor(0.7)),
    linear=linear(5, 3),
)
def scalar_parameter(m, x):
    return m.linear(x) / m.factor


@row(
    "parameter of the batch's shape",
    vectors(),
    peer=(),
    rows=lambda: nn.Parameter(torch.randn(B, 5)),
    linear=linear(5, 3),
)
def parameter_of_batch_shape(m, x):
    """Each sample has a row of the parameter to itself."""
    return m.linear(x + m.rows)


@row(
    "unused",
    vectors(),
    output=lambda o: o[0],
    weight=weight(3),
    used=linear(5, 3),
    unused=linear(5, 3),
    ignored=linear(5, 3),
)
def unused(m, x):
    """A parameter, a child and an output that nobody uses."""
    return m.used(x), m.ignored(x)


@row("random with parameters", vectors(), peer=(), weight=weight(5, 4))
def random_with_parameters(m, x):
    """Draws inside the module that has the parameter: only this draw counts."""
    return F.dropout(x @ m.weight, 0.5) + torch.randn(len(x), 4) * m.weight[0]


@row(
    "transformer, samples second",
    vectors(3, 4),
    peer=(),
    layer=lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0),
)
def samples_second(m, x):
    """A transformer layer that wants time first."""
    return m.layer(x.transpose(0, 1)).sum(0)


@row(
    "transformer",
    two(3, 4),
    transformer=lambda: nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True),
)
def translation(m, x, y):
    return m.transformer(x, y).sum(1)


@row(
    "token model",
    tokens(),
    peer=(),
    embedding=lambda: nn.Embedding(7, 4, padding_idx=0),
    positions=weight(1, 7, 4),
    token=weight(1, 1, 4),
    layer=lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True),
    head=linear(4, 3),
)
def token_model(m, x):
    """Class token, positions, attention."""
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embedding(x)], dim=1)
    return m.head(m.layer(x + m.positions)[:, 0])


@row(
    "relative positions",
    vectors(3, 4),
    peer=(),
    bias=lambda: nn.Embedding(5, 2),
    linear=linear(4, 4),
)
def relative_positions(m, x):
    """A bias that is looked up for pairs of places, the same for all samples."""
    place = torch.arange(3)
    bias = m.bias((place[:, None] - place).clamp(-2, 2) + 2).permute(2, 0, 1)
    heads = m.linear(x).unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).flatten(1)


@row("loop over a cell", vectors(3, 3), peer=(0,), cell=lambda: nn.GRUCell(3, 4))
def cell_loop(m, x):
    """One cell, once for each place."""
    state = x.new_zeros(len(x), 4)
    for place in x.unbind(1):
        state = m.cell(place, state)
    return state


@row("rolled windows", vectors(4, 4, 4), peer=(None,), attention=linear(4, 12), linear=linear(4, 4))
def windows(m, x):
    """Attention within windows of a picture that was rolled on, as in Swin."""
    x = x.roll((1, 1), (1, 2)).unflatten(2, (2, 2)).unflatten(1, (2, 2))
    q, k, v = m.attention(x.transpose(2, 3).flatten(2, 4).flatten(0, 1)).split(4, dim=2)
    x = (q @ k.mT).softmax(-1) @ v
    return m.linear(x.unflatten(0, (-1, 2)).flatten(1, 2)).flip(1)


@row(
    "rearranged",
    vectors(1, 3, 3),
    first=lambda: nn.Conv2d(1, 4, 1),
    second=lambda: nn.Conv2d(1, 2, 2),
    last=linear(8, 2),
)
def rearranged(m, x):
    """Pixels to channels and back, repeated, unfolded."""
    x = F.pixel_shuffle(m.first(x), 2)
    x = F.unfold(m.second(x).repeat(1, 1, 1, 2), 2, stride=2).transpose(1, 2)
    return m.last(x).topk(2, dim=1).values.flatten(1).index_select(1, torch.arange(3))


@row(
    "frames",
    vectors(3, 1, 4, 4),
    peer=(),
    layers=lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Tanh()),
)
def frames(m, x):
    """Several images a sample, folded into the first dimension."""
    return m.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean((1, 3))


@row("embedding bag", tokens(), peer=(), bag=lambda: nn.EmbeddingBag(7, 4, mode="sum"))
def embedding_bag(m, x):
    return m.bag(x)


@row("user's function", vectors(), peer=(), scale=weight(4), linear=linear(5, 4))
def user_function(m, x):
    """An operation with a backward pass of its own, which works for one row only."""
    return Pointwise.apply(m.linear(x), m.scale)


@row(
    "user's function of two outputs",
    vectors(),
    peer=(),
    first=weight(5, 5),
    linear=linear(5, 5),
    second=weight(5, 4),
)
def user_function_of_two(m, x):
    """A user's operation of two outputs; one is used, both are used."""
    return torch.cat(Both.apply(m.linear(Both.apply(x, m.first)[0]), m.second), dim=1)


@row("copied parameter", vectors(), weight=weight(3, 5))
def copied_parameter(m, x):
    """Casts its parameter, as mixed precision does."""
    return F.linear(x, m.weight.to(torch.float64, copy=True))


@row("operations without a rule", vectors(), first=linear(5, 6), second=linear(6, 3))
def fourier(m, x):
    """Operations that the engine has no rule for."""
    return m.second(torch.fft.rfft(m.first(x)).abs().repeat(1, 2)[:, :6])


@row("einsum", vectors(), weight=weight(5, 3, 2))
def einsum(m, x):
    return torch.einsum("bi,ijk,bk->bj", x, m.weight, x[:, :2])


@row("in place", vectors(), first=linear(5, 4), second=linear(4, 3))
def in_place(m, x):
    x = m.first(x)
    x[:, 1] = 2 * x[:, 0]
    x.tanh_()
    return m.second(x).mul_(2)


@row("samples turned", vectors(), peer=(), first=linear(5, 4), second=linear(4, 3))
def turned(m, x):
    """Samples in reverse order in the middle."""
    return m.second(m.first(x.flip(0)).tanh().flip(0))


@row(
    "samples as columns",
    vectors(),
    peer=(),
    weight=weight(3, 5),
    shift=weight(3, 1),
    last=weight(2, 3),
)
def columns(m, x):
    """Samples are columns in the middle."""
    hidden = torch.tanh(m.weight @ x.T + m.shift)
    return torch.addmm(m.shift[:2], m.last, hidden, beta=0.5, alpha=2).T


@row(
    "routed samples",
    vectors(),
    peer=(),
    gate=linear(5, 2),
    experts=lambda: nn.ModuleList([nn.Linear(5, 3) for _ in "ab"]),
)
def routed(m, x):
    """Samples go to one of two experts."""
    weights = m.gate(x).softmax(1)
    found = x.new_zeros(len(x), 3)
    for i, expert in enumerate(m.experts):
        rows = torch.arange(i, len(x), 2)
        found = found.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
    return found


@row(
    "recomputed",
    vectors(),
    peer=(),
    inner=lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh()),
    last=linear(4, 3),
)
def recomputed(m, x):
    return m.last(checkpoint(m.inner, x, use_reentrant=False))


@row("detached", vectors(), first=linear(5, 3), second=linear(5, 3))
def detached(m, x):
    return m.first(x) * m.second(x).detach()


@row("picked by index", vectors(), output=lambda o: o.unsqueeze(1), linear=linear(5, 3))
def picked(m, x):
    """One entry of each sample, by index."""
    return m.linear(x).log_softmax(1)[torch.arange(len(x)), torch.arange(len(x)) % 3]
