"""Compute the contribution of each operation to the per-sample gradients of its parameters.

Let delta = df/dy be the gradient of the model output f with respect to an operation's output y. Let
x be the input that the operation has saved, and let t run over the positions of sample i, such as
tokens or pixels. The gradients of sample i are:

    y = W x + b        dW_i = sum_t delta_t x_t^T,   db_i = sum_t delta_t
    convolution        the same formulas; x_t is the patch of the image under the kernel at pixel t
    embedding          dE_i[v] = sum_{t with index v} delta_t
    normalization      dgamma_i = sum_t delta_t * (x_t - mean) / std,   dbeta_i = sum_t delta_t
    y = w + x, w * x   dw_i = sum_t delta_t,   sum_t delta_t * x_t

These are the formulas of autograd, except that autograd also sums over the samples i. Operations
without a formula are differentiated once for each sample (``one_pass._by_operation``).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trak_core.gradients.convolution_gradients import Patches
from trak_core.gradients.gradient_terms import Contribution, Dense, Lookup, Outer
from trak_core.gradients.graph import Edge, Layout, locate, name_of, shape_of
from trak_core.gradients.margins_in_pieces import head_factors

# Number of entries that a CPU multiplies and sums at a time. The products fit into a core's cache,
# which is faster than main memory.
_CACHED = 2**18


class Use(NamedTuple):
    """The use of a tensor that all samples share, such as a weight, as an operation's input.

    ``edge`` is the edge of the graph from the operation to the tensor. ``gradient`` contains the
    gradients with respect to the operation's output for C outputs of each sample, shape
    (C, *shape of the operation's output). The samples lie along dimension ``dim`` of the
    operation's output, with ``width`` consecutive indices for each sample.
    """

    edge: Edge
    gradient: Tensor
    dim: int
    width: int
    layout: Layout

    def saved(self, name: str, *default: Any) -> Any:
        """Return the operation's saved value ``name``, or the default if there is none."""
        return getattr(self.edge.user, f"_saved_{name}", *default)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return shape_of(self.edge.node, self.edge.number)

    def by_sample(self, tensor: Tensor, dim: int, lead: int) -> Tensor:
        """Return ``tensor`` with a separate dimension for the B samples.

        In ``tensor``, the samples lie along dimension ``dim``, counted after ``lead`` leading
        dimensions. In the result, a new dimension of size B follows the leading dimensions, and
        dimension ``dim`` contains only the indices of one sample. If samples have different numbers
        of indices, they are padded with zeros.
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
        indices = indices_of_samples(self.layout.owners, self.layout.n_samples).to(tensor.device)
        is_own = (indices >= 0).view(-1, *(1 for _ in cut.shape[at + 2 :]))
        own = cut.index_select(at + 1, indices.clamp(min=0).flatten())
        own = torch.where(is_own, own, 0).unflatten(at + 1, indices.shape)
        return own.movedim(at + 1, lead).flatten(at + 1, at + 3)

    def is_along(self, dim: int) -> bool:
        return self.dim == dim or self.layout.n_samples == 1

    def gradient_by_sample(self) -> Tensor:
        return self.by_sample(self.gradient, self.dim, 1)  # (C, B, *shape of a sample's output)


def indices_of_samples(owners: Tensor, n_samples: int) -> Tensor:
    """Return a matrix whose row i contains the indices at which ``owners`` is i, padded with -1."""
    order = torch.argsort(owners, stable=True)
    order = order[owners[order] >= 0]
    counts = torch.bincount(owners[order], minlength=n_samples)
    ranks = torch.arange(len(order)) - (counts.cumsum(0) - counts)[owners[order]]
    indices = torch.full((n_samples, int(counts.max())), -1)
    indices[owners[order], ranks] = order
    return indices


def has_formula(edge: Edge) -> bool:
    """Return whether the edge's operation has a formula. It may not apply to all uses."""
    return name_of(edge.user) in _FORMULAS


def closed_forms(
    edges: Sequence[Edge], gradients: dict[int, Tensor], layouts: dict[int, Layout]
) -> Iterator[Contribution | None]:
    """Yield the per-sample gradients with respect to inputs of an operation.

    ``edges`` lead from the operation to inputs that samples share. For each edge, the result is
    None if no formula applies. ``gradients`` and ``layouts`` map the number of each output of the
    operation to the gradients with respect to this output, shape (C, *shape), and to the output's
    layout. The formulas hold for real numbers only.
    """
    user, formula, position = edges[0].user, _FORMULAS.get(name_of(edges[0].user)), None
    if formula and gradients.keys() == {0} and not gradients[0].is_complex():
        position = locate(shape_of(user, 0), layouts[0])
    for edge in edges:
        use = Use(edge, gradients[0], *position, layouts[0]) if position else None
        contribution = formula(use) if formula and use else None
        if contribution is not None and layouts[0].owners is not None:
            contribution = replace(contribution, has_ranks=True)
        yield contribution


def _summed(use: Use, gradient: Tensor) -> Contribution | None:
    """Return ``gradient``, summed over the dimensions along which the input was broadcast.

    Return None if the input was not broadcast along the dimension along which the samples lie.
    """
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
    has_terms = repeated == [*range(2, first)]
    terms = partial(own.reshape, (*own.shape[:2], -1, *shape)) if has_terms else None
    return Dense(own.sum(repeated).reshape(*own.shape[:2], *shape), terms)


def _times(gradient: Tensor, factor: Any) -> Tensor:
    return gradient if factor == 1 else gradient * factor  # no needless copy


def _added(use: Use) -> Contribution | None:
    factor = use.saved("alpha", 1) if use.edge.index == 1 else 1
    sign = -1 if name_of(use.edge.user) == "Sub" and use.edge.index == 1 else 1
    return _summed(use, _times(use.gradient, factor * sign))


def _multiplied(use: Use) -> Contribution | None:
    other = use.saved("self" if use.edge.index else "other", None)
    return None if other is None else _summed(use, use.gradient * other)


def _matrix_product(use: Use) -> Contribution | None:
    """Return the gradients of a factor of Y = X W, or of the bias b of Y = beta b + alpha X W.

    The gradient of the right factor is dW_i = sum_t x_t delta_t^T, where t runs over the rows of
    sample i. If samples share the left factor, as in Y = W X, t runs over the columns of sample i.
    """
    is_sum = name_of(use.edge.user) == "Addmm"
    if is_sum and use.edge.index == 0:
        return _summed(use, _times(use.gradient, use.saved("beta")))
    is_left = use.edge.index == int(is_sum)
    if not use.is_along(int(is_left)):  # samples lie along the entries of W
        return None
    if is_left:
        inputs, gradient = use.saved("mat2").T, use.gradient.mT
    else:
        inputs, gradient = use.saved("mat1" if is_sum else "self"), use.gradient
    if is_sum:
        gradient = _times(gradient, use.saved("alpha"))
    gradients = use.by_sample(gradient, 0, 1)
    return Outer(gradients, use.by_sample(inputs, 0, 0), is_transposed=is_left)


def _grouped_product(use: Use) -> Contribution | None:
    """Return the gradients of the weights W_g of experts g: Y[rows of g] = X[rows of g] W_g."""
    # dW_{g,i} = sum_t x_t delta_t^T, where t runs over the rows of expert g and sample i.
    inputs = use.saved("self")
    if use.edge.index != 1 or inputs.ndim != 2 or not use.is_along(0):
        return None
    n_samples, ends = use.layout.n_samples, use.saved("offs").tolist()
    formed = use.gradient.new_zeros(len(use.gradient), n_samples, *use.input_shape)
    owners = torch.zeros(len(inputs))
    if n_samples > 1:
        owners = use.layout.owners_of_blocks(use.gradient.shape[2], len(inputs))
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
        # A transposed convolution is the adjoint of a convolution. Therefore, the input x and the
        # output gradients delta swap roles in the formula for the weight's gradient.
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
    if use.dim >= max(1, indices.ndim):  # samples lie along the vectors' entries
        return None
    gradient = use.gradient
    if padding < 2**62:  # otherwise it is -1, "no padding index", read as an unsigned number
        gradient = gradient * (indices != padding).unsqueeze(-1)
    own = use.by_sample(gradient, use.dim, 1)
    own = own.reshape(*own.shape[:2], -1, own.shape[-1])
    indices = use.by_sample(indices, use.dim, 0).reshape(own.shape[1], -1)
    return Lookup(own, indices, use.input_shape[0])


def _weighted_sums(
    gradients: Tensor, normed: Callable[[slice], Tensor], dims: list[int]
) -> Contribution:
    """Return the gradients of a normalization's weight.

    They are the sums over ``dims`` of the products of output gradients and normalized inputs.
    ``gradients`` are the output gradients, shape (C, B, ...). ``normed`` is a function that returns
    the normalized inputs of a slice of samples. Products are computed for some samples at a time.
    """
    n_samples = gradients.shape[1]
    step = n_samples if gradients.is_cuda else max(1, _CACHED // max(1, gradients[0, 0].numel()))
    sums = []
    for part in (slice(start, start + step) for start in range(0, n_samples, step)):
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
    is_over_samples = use.dim >= gradients.ndim - 2 - n_normed
    if use.layout.n_samples > 1 and is_over_samples:
        return None
    inputs, mean, scale = (
        use.by_sample(use.saved(name), use.dim, 0) for name in ("input", "result1", "result2")
    )
    dims = [*range(2, gradients.ndim - n_normed)]
    return _weighted_sums(gradients, lambda x: (inputs[x] - mean[x]).mul_(scale[x]), dims)


def _by_channel(use: Use, normed: Callable[[Tensor, slice], Tensor]) -> Contribution | None:
    """Return the gradients of a normalization's weight or bias, with one entry per channel."""
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
    eps = use.saved("eps", use.saved("epsilon", None))  # "epsilon" for cuDNN and MIOpen
    scale = torch.rsqrt(use.saved("running_var") + eps).view(shape)
    return _by_channel(use, lambda images, part: (images - mean).mul_(scale))


def _head_of_margins(use: Use) -> Contribution | None:
    """Return the gradients of the last layer's weight or bias, for logits computed in pieces."""
    n_samples, shape = use.layout.n_samples, use.gradient.shape
    if use.layout.owners is not None or n_samples not in {1, shape[1]}:
        return None
    factors = head_factors(use.edge.user, use.gradient.reshape(len(use.gradient), n_samples, -1))
    return factors.bias_factors() if use.edge.index else factors


_FORMULAS: dict[str, Callable[[Use], Contribution | None]] = {
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
