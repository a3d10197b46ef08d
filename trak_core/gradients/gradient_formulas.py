"""Formulas, operation by operation, for what a parameter's use adds to its gradients."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from trak_core.gradients.gradient_terms import (
    Contribution,
    Dense,
    Lookup,
    Outer,
    add_product,
    pieces,
    prefers_inner_products,
)
from trak_core.gradients.graph import Edge, Layout, locate, name_of, shape_of
from trak_core.gradients.margins_in_pieces import head_factors

# From so many input channels on, a product for each place of the kernel is faster than patches.
_BY_PLACE_CHANNELS = 8
# From so many on, torch's own convolution is faster than patches where gradients are formed.
_BY_LIBRARY_CHANNELS = 4
# By the dimensions of the kernel, from one on.
_WEIGHT_GRADIENTS: list[Callable[..., Tensor]] = [conv1d_weight, conv2d_weight, conv3d_weight]


@dataclass(frozen=True, slots=True)
class Patches(Contribution):
    """A convolution's weight of shape (outputs, inputs / groups, *kernel).

    A convolution is a linear layer on patches of its input. Patches overlap, so that all of them
    take much more memory than the input. They are formed for some channels at a time, or not at
    all, because for one place of the kernel they are the input itself, moved.

    Attributes:
        gradients: Gradients of the output, shape (C, B, V, outputs, *output size).
        images: Shape (B, V, inputs, *size), V images a sample.
    """

    images: Tensor
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def matrix(self) -> tuple[int, int]:
        inputs = self.images.shape[2] // self.groups
        return self.gradients.shape[3], inputs * math.prod(self.kernel)

    def add_to(self, gramian: Tensor) -> None:
        c, b, v, outputs = self.gradients.shape[:4]
        inputs, window = self.images.shape[2] // self.groups, math.prod(self.kernel)
        places = v * math.prod(self.gradients.shape[4:])
        outputs //= self.groups
        if prefers_inner_products(c * b, places, inputs * window, outputs):
            for group in range(self.groups):
                patches = self._patches(group, slice(0, inputs)).transpose(-1, -2)
                gradients = self._gradients_of(group).transpose(-1, -2)
                Outer(gradients, patches, is_transposed=True).add_to(gramian)
        elif v == 1 and inputs >= _BY_PLACE_CHANNELS:
            for rows in self._by_place():
                add_product(gramian, rows)
        else:
            each = b * window * max(places, c * outputs)
            for group in range(self.groups):
                gradients = self._gradients_of(group)
                for part in pieces(inputs, each):
                    patches = self._patches(group, part)
                    rows = gradients @ patches.transpose(-1, -2)
                    add_product(gramian, rows.reshape(c * b, -1))

    def part(self, first: int, last: int) -> Tensor:
        inputs = self.images.shape[2] // self.groups
        c, _, v, outputs = self.gradients.shape[:4]
        is_cut = self.groups > 1 and last - first < outputs
        if c == v == 1 and inputs >= _BY_LIBRARY_CHANNELS and not is_cut:
            return self._by_library(first, last)
        each = self.gradients.shape[3] // self.groups
        parts = []
        for group in range(first // each, -(-last // each)):
            own = slice(max(0, first - group * each), min(each, last - group * each))
            patches = self._patches(group, slice(0, inputs)).transpose(-1, -2)
            parts.append(self._gradients_of(group)[:, :, own] @ patches)
        return torch.cat(parts, dim=2).flatten(0, 1).flatten(1)

    def _by_library(self, first: int, last: int) -> Tensor:
        """Have torch compute the gradient of one convolution whose groups are the samples."""
        gradients, images = self.gradients[0, :, 0, first:last], self.images[:, 0]
        n_samples, outputs = gradients.shape[:2]
        size = (n_samples * outputs, images.shape[1] // self.groups, *self.kernel)
        grouped = _WEIGHT_GRADIENTS[len(self.kernel) - 1](
            images.reshape(1, -1, *images.shape[2:]),
            size,
            gradients.reshape(1, -1, *gradients.shape[2:]),
            self.stride,
            self.padding,
            self.dilation,
            n_samples * self.groups,
        )
        return grouped.reshape(n_samples, -1)

    def _gradients_of(self, group: int) -> Tensor:
        """Return one group's gradients, shape (C, B, outputs / groups, V x places)."""
        n = self.gradients.shape[3] // self.groups
        part = self.gradients[:, :, :, group * n : (group + 1) * n].flatten(4)
        return part.transpose(2, 3).flatten(3)

    def _patches(self, group: int, part: slice) -> Tensor:
        """Return patches of some channels of a group, (B, channels x window, V x places)."""
        first = group * (self.images.shape[2] // self.groups)
        images = self.images[:, :, first + part.start : first + part.stop]
        images = F.pad(images, [n for size in self.padding[::-1] for n in (size, size)])
        sizes = self.gradients.shape[4:]
        n_dims = len(self.kernel)
        steps = images.stride()[-n_dims:]
        windows = images.as_strided(
            (*images.shape[:3], *self.kernel, *sizes),
            (
                *images.stride()[:3],
                *(step * d for step, d in zip(steps, self.dilation, strict=True)),
                *(step * d for step, d in zip(steps, self.stride, strict=True)),
            ),
            images.storage_offset(),
        )
        b, v = images.shape[:2]
        flat = windows.reshape(b, v, -1, math.prod(sizes))
        return flat.transpose(1, 2).flatten(2)

    def _by_place(self) -> Iterator[Tensor]:
        """Yield the gradients of the weights at each place of the kernel, shape (rows, entries).

        Gradients lie on a grid as wide as the input. The input, moved by one place, is then the
        input read from another entry on. A stride cuts the input into interleaved images, one for
        each remainder.
        """
        c, b, _, outputs = self.gradients.shape[:4]
        phases = self._phases()
        grid = phases.shape[-len(self.kernel) :]
        sizes = self.gradients.shape[4:]
        wider = [(0, width - size) for size, width in zip(sizes, grid, strict=True)]
        margins = [n for pair in wider[:0:-1] for n in pair]
        gradients = F.pad(self.gradients[:, :, 0], margins) if any(margins) else self.gradients
        gradients = gradients.reshape(c * b, outputs, -1)
        steps = [math.prod(grid[i + 1 :]) for i in range(len(grid))]
        length = 1 + sum(step * (size - 1) for step, size in zip(steps, sizes, strict=True))
        gradients = gradients[..., :length]
        n_outputs, n_inputs = outputs // self.groups, self.images.shape[2] // self.groups
        for place in itertools.product(*map(range, self.kernel)):
            moves = [at * d for at, d in zip(place, self.dilation, strict=True)]
            phase = tuple(move % s for move, s in zip(moves, self.stride, strict=True))
            start = sum(
                move // s * step for move, s, step in zip(moves, self.stride, steps, strict=True)
            )
            moved = phases[phase].flatten(2)[..., start : start + length].mT
            for group in range(self.groups):
                own = gradients[:, group * n_outputs : (group + 1) * n_outputs]
                seen = moved[..., group * n_inputs : (group + 1) * n_inputs]
                for part in pieces(n_inputs, c * b * n_outputs):
                    inputs = seen[..., part]
                    yield torch.bmm(own, inputs.repeat(c, 1, 1) if c > 1 else inputs).flatten(1)

    def _phases(self) -> Tensor:
        """Cut the padded images, shape (*stride, B, inputs, *size / stride)."""
        images = self.images[:, 0]
        margins = [
            (pad, pad + -(size + 2 * pad) % step)
            for size, pad, step in zip(images.shape[2:], self.padding, self.stride, strict=True)
        ]
        flat = [n for pair in margins[::-1] for n in pair]
        images = F.pad(images, flat) if any(flat) else images.contiguous()
        for i, step in enumerate(self.stride):
            images = images.unflatten(2 + 2 * i, (-1, step))
        n = len(self.stride)
        remainders = [3 + 2 * i for i in range(n)]
        return images.permute(*remainders, 0, 1, *(2 + 2 * i for i in range(n))).contiguous()


# Entries whose products are summed at a time: they stay in a core's own cache.
_CACHED = 2**18


class Use(NamedTuple):
    """One input of an operation that all samples share, at the end of an edge.

    The gradient is that of the operation's output, shape (C, *shape). The output's dimension
    ``dim``, C not counted, has the samples, with ``width`` consecutive places each.
    """

    edge: Edge
    gradient: Tensor
    dim: int
    width: int
    layout: Layout

    def saved(self, name: str) -> Any:
        """Return what the operation saved for its backward pass."""
        return getattr(self.edge.user, f"_saved_{name}")

    def has_saved(self, name: str) -> bool:
        return hasattr(self.edge.user, f"_saved_{name}")

    @property
    def input_shape(self) -> tuple[int, ...]:
        return shape_of(self.edge.node, self.edge.number)

    def by_sample(self, tensor: Tensor, dim: int, lead: int) -> Tensor:
        """Return shape (*lead, B, *shape); along ``dim`` only a sample's own places are left.

        There are as many places for each; those that a sample doesn't have hold zeros.
        """
        if self.layout.n_samples == 1:
            return tensor.unsqueeze(lead)
        at, shape = lead + dim, tensor.shape
        size = shape[at] // (self.layout.period * self.width)
        if size == 1 and self.layout.owners is None:
            cut = tensor.view(*shape[:at], self.layout.period, self.width, *shape[at + 1 :])
            return cut.movedim(at, lead) if dim else cut
        cut = tensor.unflatten(at, (size, self.layout.period, self.width))
        if self.layout.owners is None:
            return cut.movedim(at + 1, lead).flatten(at + 1, at + 2)
        places = own_places(self.layout.owners, self.layout.n_samples).to(tensor.device)
        is_own = (places >= 0).view(-1, *(1 for _ in cut.shape[at + 2 :]))
        own = cut.index_select(at + 1, places.clamp(min=0).flatten())
        own = torch.where(is_own, own, 0).unflatten(at + 1, places.shape)
        return own.movedim(at + 1, lead).flatten(at + 1, at + 3)

    def is_along(self, dim: int) -> bool:
        """Whether samples lie along a dimension of the output; a single one lies along all."""
        return self.dim == dim or self.layout.n_samples == 1

    def gradient_by_sample(self) -> Tensor:
        """Return the gradient of the output by samples, shape (C, B, *shape)."""
        return self.by_sample(self.gradient, self.dim, 1)


def own_places(owners: Tensor, n_samples: int) -> Tensor:
    """Return each sample's places among owners, shape (B, most), -1 behind its last."""
    order = torch.argsort(owners, stable=True)
    order = order[owners[order] >= 0]
    counts = torch.bincount(owners[order], minlength=n_samples)
    ranks = torch.arange(len(order)) - (counts.cumsum(0) - counts)[owners[order]]
    places = torch.full((n_samples, int(counts.max())), -1)
    places[owners[order], ranks] = order
    return places


def has_form(edge: Edge) -> bool:
    """Whether there is a closed form for most crossings of this operation."""
    return name_of(edge.user) in _FORMS


def closed_forms(
    edges: Sequence[Edge], gradients: dict[int, Tensor], layouts: dict[int, Layout]
) -> Iterator[Contribution | None]:
    """Yield the contributions of an operation's crossings; None where it must be differentiated.

    The edges lead from split outputs to shared inputs; ``gradients``, shape (C, *shape) each, and
    ``layouts`` are those of the outputs. The formulas are those of real numbers.
    """
    make, user = _FORMS.get(name_of(edges[0].user)), edges[0].user
    is_known = make is not None and gradients.keys() == {0} and not gradients[0].is_complex()
    place = locate(shape_of(user, 0), layouts[0]) if is_known else None
    for edge in edges:
        form = make(Use(edge, gradients[0], *place, layouts[0])) if make and place else None
        is_ranked = layouts[0].owners is not None if place else False
        yield replace(form, has_ranks=True) if form is not None and is_ranked else form


def _summed(use: Use, gradient: Tensor) -> Contribution | None:
    """Sum over the dimensions along which the tensor was repeated."""
    shape = use.input_shape
    dim = use.dim - (gradient.ndim - 1) + len(shape)
    if dim >= 0 and shape[dim] != 1 and use.layout.n_samples > 1:
        return None
    own = use.by_sample(gradient, use.dim, 1)
    first = own.ndim - len(shape)
    repeated = [*range(2, first)]
    repeated += [first + i for i, n in enumerate(shape) if n == 1 != own.shape[first + i]]
    if not repeated:
        return Dense(own.reshape(*own.shape[:2], *shape))
    terms = None
    if repeated == [*range(2, first)]:
        terms = partial(own.reshape, (*own.shape[:2], -1, *shape))
    return Dense(own.sum(repeated).reshape(*own.shape[:2], *shape), terms)


def _times(gradient: Tensor, factor: Any) -> Tensor:
    return gradient if factor == 1 else gradient * factor  # no needless copy


def _added(use: Use) -> Contribution | None:
    factor = use.saved("alpha") if use.edge.index == 1 and use.has_saved("alpha") else 1
    sign = -1 if name_of(use.edge.user) == "Sub" and use.edge.index == 1 else 1
    return _summed(use, _times(use.gradient, factor * sign))


def _multiplied(use: Use) -> Contribution | None:
    other = use.saved("self" if use.edge.index else "other") if use.has_saved("self") else None
    return None if other is None else _summed(use, use.gradient * other)


def _matrix_product(use: Use) -> Contribution | None:
    """Serve a linear layer, from either side; the first input of an Addmm is the bias."""
    is_sum = name_of(use.edge.user) == "Addmm"
    if is_sum and use.edge.index == 0:
        return _summed(use, _times(use.gradient, use.saved("beta")))
    is_left = use.edge.index == int(is_sum)
    if not use.is_along(int(is_left)):  # samples along what the other factor brings
        return None
    left, right = ("mat1", "mat2") if is_sum else ("self", "mat2")
    inputs, gradient = (
        (use.saved(right).T, use.gradient.mT) if is_left else (use.saved(left), use.gradient)
    )
    if is_sum:
        gradient = _times(gradient, use.saved("alpha"))
    gradients = use.by_sample(gradient, 0, 1)
    return Outer(gradients, use.by_sample(inputs, 0, 0), is_transposed=is_left)


def _grouped_product(use: Use) -> Contribution | None:
    """Serve experts: each group of rows is multiplied by a matrix of its own."""
    inputs = use.saved("self")
    if use.edge.index != 1 or inputs.ndim != 2 or not use.is_along(0):
        return None
    n_samples, ends = use.layout.n_samples, use.saved("offs").tolist()
    formed = use.gradient.new_zeros(len(use.gradient), n_samples, *use.input_shape)
    owners = torch.zeros(len(inputs))
    if n_samples > 1:
        owners = use.layout.of_blocks(use.gradient.shape[2], len(inputs))
    for sample in range(n_samples):
        for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            own = (start + (owners[start:end] == sample).nonzero().flatten()).to(inputs.device)
            if len(own):
                formed[:, sample, group] = inputs[own].T @ use.gradient[:, own]
    return Dense(formed)


def _convolved(use: Use) -> Contribution | None:
    if not use.is_along(0):
        return None
    if use.edge.index == 2:
        return Dense(use.gradient_by_sample().transpose(2, 3).flatten(3).sum(3))
    gradients, images = use.gradient_by_sample(), use.by_sample(use.saved("input"), 0, 0)
    if use.saved("transposed"):
        # The adjoint of a convolution: input and gradient change places, for every row.
        c = len(gradients)
        repeated = images.repeat(c, *(1 for _ in images.shape[1:]))
        images, gradients = gradients.flatten(0, 1), repeated.unsqueeze(0)
    stride, padding, dilation = (
        tuple(int(n) for n in use.saved(name)) for name in ("stride", "padding", "dilation")
    )
    kernel, groups = use.input_shape[2:], use.saved("groups")
    return Patches(gradients, images, kernel, stride, padding, dilation, groups)


def _looked_up(use: Use) -> Contribution | None:
    if use.saved("scale_grad_by_freq"):
        return None
    indices, padding = use.saved("indices"), use.saved("padding_idx")
    if use.dim >= max(1, indices.ndim):  # samples along the vectors' entries
        return None
    gradient = use.gradient
    if padding < 2**62:  # or else it is negative, as an unsigned number: nothing is padded
        gradient = gradient * (indices != padding).unsqueeze(-1)
    own = use.by_sample(gradient, use.dim, 1)
    own = own.reshape(*own.shape[:2], -1, own.shape[-1])
    places = use.by_sample(indices, use.dim, 0).reshape(own.shape[1], -1)
    return Lookup(own, places, use.input_shape[0])


def _weighted_sums(
    gradients: Tensor, normed: Callable[[slice], Tensor], dims: list[int]
) -> Contribution:
    """Sum gradients (C, B, ...) times normalised inputs over ``dims``, a few samples at a time."""
    step = max(1, _CACHED // max(1, gradients[0, 0].numel()))
    sums = []
    for start in range(0, gradients.shape[1], step):
        part = slice(start, start + step)
        products = gradients[:, part] * normed(part)
        sums.append(products.sum(dims) if dims else products)

    def terms() -> Tensor:
        return (gradients * normed(slice(None))).flatten(2, dims[-1])

    has_terms = dims and dims == [*range(2, 2 + len(dims))]
    total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
    return Dense(total, terms if has_terms else None)


def _layer_normed(use: Use) -> Contribution | None:
    if use.edge.index == 2:
        return _summed(use, use.gradient)
    gradients = use.gradient_by_sample()
    n_normed = len(use.input_shape)
    if (
        use.layout.n_samples > 1 and use.dim >= gradients.ndim - 2 - n_normed
    ):  # it normalises over the samples
        return None
    inputs, mean, scale = (
        use.by_sample(use.saved(name), use.dim, 0) for name in ("input", "result1", "result2")
    )
    dims = [*range(2, gradients.ndim - n_normed)]
    return _weighted_sums(gradients, lambda x: (inputs[x] - mean[x]).mul_(scale[x]), dims)


def _by_channel(use: Use, normed: Callable[[Tensor, slice], Tensor]) -> Contribution | None:
    """Sum over all dimensions except the channels; samples lie along the first dimension."""
    if not use.is_along(0):
        return None
    gradients = use.gradient_by_sample()
    dims = [2, *range(4, gradients.ndim)]
    if use.edge.index == 2:
        return Dense(gradients.sum(dims))
    images = use.by_sample(use.saved("input"), 0, 0)
    return _weighted_sums(gradients, lambda part: normed(images[part], part), dims)


def _group_normed(use: Use) -> Contribution | None:
    if not use.is_along(0):
        return None
    mean, scale = (use.by_sample(use.saved(name), 0, 0) for name in ("result1", "result2"))

    def normed(images: Tensor, part: slice) -> Tensor:
        grouped = images.reshape(*mean[part].shape, -1)
        grouped = grouped - mean[part].unsqueeze(-1)
        return grouped.mul_(scale[part].unsqueeze(-1)).view(images.shape)

    return _by_channel(use, normed)


def _batch_normed(use: Use) -> Contribution | None:
    if use.saved("training"):
        return None
    shape = (-1, *(1 for _ in use.saved("input").shape[2:]))
    mean = use.saved("running_mean").view(shape)
    eps = use.saved("eps" if use.has_saved("eps") else "epsilon")  # as cuDNN and MIOpen call it
    scale = torch.rsqrt(use.saved("running_var") + eps).view(shape)
    return _by_channel(use, lambda images, part: (images - mean).mul_(scale))


def _head_of_margins(use: Use) -> Contribution | None:
    """Serve the last layer of a language model whose logits are computed in pieces."""
    n_samples, shape = use.layout.n_samples, use.gradient.shape
    if use.layout.owners is not None or n_samples not in {1, shape[1]}:
        return None
    factors = head_factors(use.edge.user, use.gradient.reshape(len(use.gradient), n_samples, -1))
    return factors.of_bias() if use.edge.index else factors


_FORMS: dict[str, Callable[[Use], Contribution | None]] = {
    "Add": _added,
    "Sub": _added,
    "Mul": _multiplied,
    "Expand": lambda use: _summed(use, use.gradient),
    "Addmm": _matrix_product,
    "Mm": _matrix_product,
    "GroupedMm": _grouped_product,
    "Convolution": _convolved,
    "Embedding": _looked_up,
    "NativeLayerNorm": _layer_normed,
    "NativeGroupNorm": _group_normed,
    "NativeBatchNorm": _batch_normed,
    "CudnnBatchNorm": _batch_normed,
    "MiopenBatchNorm": _batch_normed,
    "HeadOfMargins": _head_of_margins,
}
