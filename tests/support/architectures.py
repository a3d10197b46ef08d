"""Small networks with one quirk each, for the Gramian engine. Make them under float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

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


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        x = x + self.first(x).tanh()
        return x + self.second(x)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x).sigmoid()
        return torch.cat([self.left(x), self.right(x.square())], dim=1)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x, y):
        return self.left(x) * self.right(y)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x).tanh()
        return self.left(x), self.right(x)


class Tree(nn.Module):
    """Takes and returns nested containers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, tree):
        a = self.left(tree["a"][0])
        return {"sum": [a + self.right(tree["a"][1]["b"])], "rest": (a,)}


class Wrapped(nn.Module):
    """Passes everything through a module with parameters of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.randn(()))

    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
        found["sum"][0] = found["sum"][0] * self.scale
        return found


class KeywordArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x, *, shift, factor=1.0):
        return self.linear(x + shift) * factor


class NotTensors(nn.Module):
    """Takes and returns things that aren't tensors."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))

        def forward(self, x, power, mode, nothing):
            assert nothing is None
            y = x @ self.weight
            return (y**power if mode == "power" else y), mode, 7

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        y, _, number = self.inner(x, 2, "power", None)
        return y * number


class ReusedParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.T


class SquaredParameter(nn.Module):
    """One operation takes the same parameter twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * (self.weight * self.weight) + torch.outer(x[:, 0], self.weight)


class ReusedModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(self.linear(x).tanh())


class SharedBetweenModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x)).tanh().mean(1)


class ParameterOfChild(nn.Module):
    """Uses a child's parameters without calling the child."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(5, 3)

    def forward(self, x):
        return F.linear(x, self.child.weight, self.child.bias).tanh()


class CalledAndUsed(nn.Module):
    """Calls a child and uses its parameters as well."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(5, 5)

    def forward(self, x):
        return self.child(x).tanh() @ self.child.weight


class OwnAndChildren(nn.Module):
    """Direct parameters before, between and behind children."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3))
        self.child = nn.Linear(5, 3)

    def forward(self, x):
        return (self.shift - self.child(x * self.scale)).tanh() - 2 * self.shift


class ScalarParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.linear = nn.Parameter(torch.tensor(0.7)), nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x) / self.factor


class ParameterOfBatchShape(nn.Module):
    """Each sample has a row of the parameter to itself."""

    def __init__(self):
        super().__init__()
        self.rows, self.linear = nn.Parameter(torch.randn(B, 5)), nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x + self.rows)


class Unused(nn.Module):
    """A parameter, a child and an output that nobody uses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.used, self.unused, self.ignored = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x), self.ignored(x)


class FrozenParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(x).tanh())


class FrozenMiddle(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("scale", torch.randn(3))

    def forward(self, x):
        return self.linear(x) * self.scale


class SideEffects(nn.Module):
    """Counts its calls, and its output depends on the count."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return (x @ self.weight) ** (1 + int(self.calls))

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return self.inner(x)


class RandomWithParameters(nn.Module):
    """Draws inside the module that has the parameter: only this draw counts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return F.dropout(x @ self.weight, 0.5) + torch.randn(len(x), 4) * self.weight[0]


class SelfAttention(nn.Module):
    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.options = options

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0].sum(1)


class CrossAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x, y):
        return self.attention(x, y, y, need_weights=False)[0].flatten(1)


class SamplesSecond(nn.Module):
    """A transformer layer that wants time first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).sum(0)


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)

    def forward(self, x, y):
        return self.transformer(x, y).sum(1)


class TokenModel(nn.Module):
    """Class token, positions, attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, 7, 4))
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embedding(x)], dim=1)
        return self.head(self.layer(x + self.positions)[:, 0])


class RelativePositions(nn.Module):
    """A bias that is looked up for pairs of places, the same for all samples."""

    def __init__(self):
        super().__init__()
        self.bias, self.linear = nn.Embedding(5, 2), nn.Linear(4, 4)

    def forward(self, x):
        place = torch.arange(3)
        bias = self.bias((place[:, None] - place).clamp(-2, 2) + 2).permute(2, 0, 1)
        heads = self.linear(x).unflatten(2, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).flatten(1)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.recurrent = kind(3, 4, batch_first=True, **options)

    def forward(self, x):
        return self.recurrent(x)[0][:, -1]


class CellLoop(nn.Module):
    """One cell, once for each place."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x):
        state = x.new_zeros(len(x), 4)
        for place in x.unbind(1):
            state = self.cell(place, state)
        return state


class Frames(nn.Module):
    """Several images a sample, folded into the first dimension."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Tanh())

    def forward(self, x):
        return self.layers(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean((1, 3))


class EmbeddingBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, mode="sum")

    def forward(self, x):
        return self.bag(x)


class Reparametrized(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear = how(nn.Linear(5, 3))

    def forward(self, x):
        return self.linear(x).tanh()


class Windows(nn.Module):
    """Attention within windows of a picture that was rolled on, as in Swin."""

    def __init__(self):
        super().__init__()
        self.attention, self.linear = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        x = x.roll((1, 1), (1, 2)).unflatten(2, (2, 2)).unflatten(1, (2, 2))
        q, k, v = self.attention(x.transpose(2, 3).flatten(2, 4).flatten(0, 1)).split(4, dim=2)
        x = (q @ k.mT).softmax(-1) @ v
        return self.linear(x.unflatten(0, (-1, 2)).flatten(1, 2)).flip(1)


class Rearranged(nn.Module):
    """Pixels to channels and back, repeated, unfolded."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 1), nn.Conv2d(1, 2, 2)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        x = F.pixel_shuffle(self.first(x), 2)
        x = F.unfold(self.second(x).repeat(1, 1, 1, 2), 2, stride=2).transpose(1, 2)
        return self.last(x).topk(2, dim=1).values.flatten(1).index_select(1, torch.arange(3))


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


class UserFunction(nn.Module):
    """An operation with a backward pass of its own, which works for one row only."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.randn(4)), nn.Linear(5, 4)

    def forward(self, x):
        return Pointwise.apply(self.linear(x), self.scale)


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


class UserFunctionOfTwo(nn.Module):
    """A user's operation of two outputs; one is used, both are used."""

    def __init__(self):
        super().__init__()
        self.first, self.linear = nn.Parameter(torch.randn(5, 5)), nn.Linear(5, 5)
        self.second = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return torch.cat(Both.apply(self.linear(Both.apply(x, self.first)[0]), self.second), dim=1)


class CopiedParameter(nn.Module):
    """Casts its parameter, as mixed precision does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))

    def forward(self, x):
        return F.linear(x, self.weight.to(torch.float64, copy=True))


class Fourier(nn.Module):
    """Operations that the engine has no rule for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(torch.fft.rfft(self.first(x)).abs().repeat(1, 2)[:, :6])


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, 2))

    def forward(self, x):
        return torch.einsum("bi,ijk,bk->bj", x, self.weight, x[:, :2])


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        x[:, 1] = 2 * x[:, 0]
        x.tanh_()
        return self.second(x).mul_(2)


class Turned(nn.Module):
    """Samples in reverse order in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x.flip(0)).tanh().flip(0))


class Columns(nn.Module):
    """Samples are columns in the middle."""

    def __init__(self):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3, 1))
        self.last = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        hidden = torch.tanh(self.weight @ x.T + self.shift)
        return torch.addmm(self.shift[:2], self.last, hidden, beta=0.5, alpha=2).T


class Routed(nn.Module):
    """Samples go to one of two experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 2), nn.ModuleList([nn.Linear(5, 3) for _ in "ab"])

    def forward(self, x):
        weights = self.gate(x).softmax(1)
        found = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = torch.arange(i, len(x), 2)
            found = found.index_add(0, rows, expert(x[rows]) * weights[rows, i, None])
        return found


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(5, 4), nn.Tanh()), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.first(x) * self.second(x).detach()


class Picked(nn.Module):
    """One entry of each sample, by index."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x).log_softmax(1)[torch.arange(len(x)), torch.arange(len(x)) % 3]


def layers(*parts):
    return lambda: nn.Sequential(*(part() for part in parts))


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


def pooled(pool):
    return Architecture(
        layers(lambda: nn.Conv2d(1, 2, 2), lambda: pool, lambda: nn.Conv2d(2, 2, 1), nn.Flatten),
        vectors(1, 5, 5),
    )


def tree():
    return (default_collate([{"a": [torch.randn(5), {"b": torch.randn(5)}]} for _ in range(B)]),)


ALONE = {"peer": ()}


ARCHITECTURES = {
    "linear": Architecture(lambda: nn.Linear(5, 3), vectors()),
    "linear without bias": Architecture(lambda: nn.Linear(5, 3, bias=False), vectors()),
    "linear on sequences": Architecture(
        layers(lambda: nn.Linear(5, 3), nn.Tanh, lambda: nn.Linear(3, 2)), vectors(6, 5)
    ),
    "narrow linear on long sequences": Architecture(
        layers(lambda: nn.Linear(2, 1), nn.Tanh, lambda: nn.Linear(1, 2)), vectors(50, 2)
    ),
    "MLP": Architecture(
        layers(lambda: nn.Linear(5, 6), nn.ReLU, lambda: nn.Linear(6, 6), nn.GELU), vectors()
    ),
    "residual": Architecture(Residual, vectors()),
    "branches": Architecture(Branches, vectors()),
    "two inputs": Architecture(TwoInputs, two()),
    "two outputs": Architecture(TwoOutputs, vectors(), output=lambda o: torch.cat(o, dim=1)),
    "nested containers": Architecture(Tree, tree, output=lambda o: o["sum"][0] + o["rest"][0]),
    "nested containers, changed": Architecture(
        lambda: Wrapped(Tree()), tree, output=lambda o: o["sum"][0], **ALONE
    ),
    "keyword arguments": Architecture(
        KeywordArguments, vectors(), lambda: {"shift": torch.randn(B, 5), "factor": 3.0}
    ),
    "not tensors": Architecture(NotTensors, vectors()),
    "parameter reused": Architecture(ReusedParameter, vectors()),
    "parameter squared": Architecture(SquaredParameter, vectors()),
    "module reused": Architecture(ReusedModule, vectors(), peer=(0,)),
    "parameter shared between modules": Architecture(SharedBetweenModules, vectors(), **ALONE),
    "tied embedding": Architecture(TiedEmbedding, tokens(), **ALONE),
    "parameter of a child": Architecture(ParameterOfChild, vectors(), **ALONE),
    "child called and its parameter used": Architecture(CalledAndUsed, vectors(), **ALONE),
    "own parameters and children": Architecture(OwnAndChildren, vectors()),
    "scalar parameter": Architecture(ScalarParameter, vectors()),
    "parameter of the batch's shape": Architecture(ParameterOfBatchShape, vectors(), **ALONE),
    "unused": Architecture(Unused, vectors(), output=lambda o: o[0]),
    "frozen parameter": Architecture(FrozenParameter, vectors()),
    "frozen middle": Architecture(FrozenMiddle, vectors()),
    "buffers": Architecture(Buffers, vectors()),
    "side effects": Architecture(SideEffects, vectors(), **ALONE),
    "dropout": Architecture(
        layers(lambda: nn.Linear(5, 6), nn.Dropout, lambda: nn.Linear(6, 3)), vectors()
    ),
    "random with parameters": Architecture(RandomWithParameters, vectors(), **ALONE),
    "self-attention": Architecture(SelfAttention, vectors(3, 4)),
    "self-attention without weights": Architecture(
        lambda: SelfAttention(need_weights=False), vectors(3, 4)
    ),
    "self-attention with dropout": Architecture(lambda: SelfAttention(0.3), vectors(3, 4), **ALONE),
    "cross-attention": Architecture(CrossAttention, two(3, 4)),
    "cross-attention with bias vectors": Architecture(
        lambda: CrossAttention(add_bias_kv=True), two(3, 4)
    ),
    "cross-attention of other widths": Architecture(
        lambda: CrossAttention(kdim=5, vdim=5), lambda: (torch.randn(B, 3, 4), torch.randn(B, 2, 5))
    ),
    "transformer encoder layer": Architecture(
        layers(
            lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), nn.Flatten
        ),
        vectors(3, 4),
    ),
    "transformer, samples second": Architecture(SamplesSecond, vectors(3, 4), **ALONE),
    "transformer": Architecture(Translation, two(3, 4)),
    "token model": Architecture(TokenModel, tokens(), **ALONE),
    "relative positions": Architecture(RelativePositions, vectors(3, 4), **ALONE),
    "RNN": Architecture(lambda: Recurrent(nn.RNN), vectors(3, 3), peer=(None,)),
    "LSTM": Architecture(lambda: Recurrent(nn.LSTM, num_layers=2), vectors(3, 3), peer=(None,)),
    "GRU, both ways": Architecture(
        lambda: Recurrent(nn.GRU, bidirectional=True), vectors(3, 3), peer=(None,)
    ),
    "loop over a cell": Architecture(CellLoop, vectors(3, 3), peer=(0,)),
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
    "rolled windows": Architecture(Windows, vectors(4, 4, 4), peer=(None,)),
    "rearranged": Architecture(Rearranged, vectors(1, 3, 3)),
    "frames": Architecture(Frames, vectors(3, 1, 4, 4), **ALONE),
    "max pooling": pooled(nn.MaxPool2d(2)),
    "average pooling": pooled(nn.AdaptiveAvgPool2d(2)),
    "upsampling": pooled(nn.Upsample(scale_factor=2, mode="bilinear")),
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
    "embedding bag": Architecture(EmbeddingBag, tokens(), **ALONE),
    "bilinear": Architecture(lambda: nn.Bilinear(5, 5, 3), two()),
    "weight norm": Architecture(
        lambda: Reparametrized(nn.utils.parametrizations.weight_norm), vectors(), **ALONE
    ),
    "orthogonal weight": Architecture(
        lambda: Reparametrized(nn.utils.parametrizations.orthogonal), vectors(), **ALONE
    ),
    "user's function": Architecture(UserFunction, vectors(), **ALONE),
    "user's function of two outputs": Architecture(UserFunctionOfTwo, vectors(), **ALONE),
    "copied parameter": Architecture(CopiedParameter, vectors()),
    "operations without a rule": Architecture(Fourier, vectors()),
    "einsum": Architecture(Einsum, vectors()),
    "in place": Architecture(InPlace, vectors()),
    "samples turned": Architecture(Turned, vectors(), **ALONE),
    "samples as columns": Architecture(Columns, vectors(), **ALONE),
    "routed samples": Architecture(Routed, vectors(), **ALONE),
    "recomputed": Architecture(Recomputed, vectors(), **ALONE),
    "detached": Architecture(Detached, vectors()),
    "picked by index": Architecture(Picked, vectors(), output=lambda o: o.unsqueeze(1)),
}
