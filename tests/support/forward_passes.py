"""Forward passes of networks in ``architectures``."""

import torch
import torch.nn.functional as F
from torch import nn


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
