"""Say which sample each entry of an operation's input belongs to, given that of its output.

A rule may only answer with a layout if every entry of the output depends on entries of the input
that belong to the same sample. Operations that aren't listed are probed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from trak_core.autograd.graph import (
    Edge,
    Layout,
    Node,
    guessed,
    is_function,
    joined,
    layout_of,
    leaf_of,
    locate,
    name_of,
    probed_layouts,
    shape_of,
    stride_at,
)


class MixedSamplesError(Exception):
    """An operation takes statistics over samples that are said to be independent."""


@dataclass(frozen=True, slots=True)
class At:
    """One input of one operation, by its number and shape, and the layout of one of its outputs.

    Owners lie in the output's dimension ``dim`` (-1 if they are spread over several), with
    ``width`` consecutive places each.
    """

    node: Node
    index: int
    output: tuple[int, ...]
    input: tuple[int, ...]
    layout: Layout
    dim: int
    width: int

    def along(self, dim: int) -> Layout | None:
        """Return the layout of an input with the owners along ``dim``, in the same order."""
        if not (0 <= dim < len(self.input) and self.input[dim] == self.output[self.dim]):
            return None
        stride = stride_at(self.input, dim, self.width, self.layout.period)
        return None if stride is None else replace(self.layout, stride=stride)

    def owners_of_rows(self, n_dims: int) -> Tensor | None:
        """Return the owners of what the output's first dimensions number, in their shape.

        None if such a row has several.
        """
        tail = math.prod(self.output[n_dims:])
        if self.layout.stride % tail:
            return None
        head = self.output[:n_dims]
        return self.layout.of_blocks(tail, math.prod(head)).view(head)

    def saved_dims(self, n_dims: int) -> set[int]:
        """Return the dimensions that the operation was given, all of ``n_dims`` if none."""
        saved = getattr(self.node, "_saved_dim", getattr(self.node, "_saved_dims", None))
        values = range(n_dims) if saved is None else saved if isinstance(saved, tuple) else (saved,)
        return {_signed(v) % n_dims for v in values} or set(range(n_dims))


def _signed(dim: int) -> int:
    """Undo that negative dimensions come back from the graph as unsigned 64-bit numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


Rule = Callable[[At], Layout | None]


def _reshaped(at: At) -> Layout | None:
    return at.layout


def _pointwise(at: At) -> Layout | None:
    if at.dim >= 0:
        return at.along(at.dim - len(at.output) + len(at.input))
    return at.layout if at.input == at.output else None  # no broadcasting: positions stay


def _over_saved_dims(at: At) -> Layout | None:
    """Mixes entries along the dimensions that the operation was given, and no others."""
    return None if at.dim in at.saved_dims(len(at.output)) else at.along(at.dim)


def _sliced(at: At) -> Layout | None:
    """Changes the number of places along dimensions without samples."""
    return at.along(at.dim) if len(at.input) == len(at.output) else None


def _padded(at: At) -> Layout | None:
    pad = at.node._saved_pad
    behind = len(at.output) - 1 - at.dim
    return None if any(pad[2 * behind : 2 * behind + 2]) else at.along(at.dim)


def _reduced(at: At) -> Layout | None:
    """Sums, means and other reductions over given dimensions."""
    gone = at.saved_dims(len(at.input))
    if getattr(at.node, "_saved_keepdim", False):
        return None if at.dim in gone else at.along(at.dim)
    kept = [dim for dim in range(len(at.input)) if dim not in gone]
    return at.along(kept[at.dim]) if at.dim < len(kept) == len(at.output) else None


def _selected(at: At) -> Layout | None:
    """One dimension fewer in the output than in the input."""
    (gone,) = at.saved_dims(len(at.input))
    return at.along(at.dim + (at.dim >= gone))


def _joined(at: At) -> Layout | None:
    (dim,) = at.saved_dims(len(at.output))
    if at.dim == dim:
        return None
    return at.along(at.dim - (at.dim > dim) if len(at.input) < len(at.output) else at.dim)


def _transposed(at: At) -> Layout | None:
    a, b = (_signed(d) % len(at.output) for d in (at.node._saved_dim0, at.node._saved_dim1))
    return at.along({a: b, b: a}.get(at.dim, at.dim))


def _permuted(at: At) -> Layout | None:
    return at.along(_signed(at.node._saved_dims[at.dim]) % len(at.output))


def _matrix_transposed(at: At) -> Layout | None:
    return at.along(1 - at.dim) if len(at.output) == 2 else at.layout


def _indexed(at: At) -> Layout | None:
    """Rows were picked by indices, as a router does: each belongs to whoever got it."""
    n_dims, numbers, index = _rows(at.input, at.node._saved_indices)
    picked = numbers[index]
    if at.dim >= picked.ndim:  # nothing picks along the samples
        return at.along(at.dim - picked.ndim + n_dims)
    own = at.owners_of_rows(picked.ndim)
    return None if own is None else _owned(at, n_dims, picked, own)


def _index_selected(at: At) -> Layout | None:
    (dim,) = at.saved_dims(len(at.output))
    if at.dim != dim:
        return at.along(at.dim)
    n_dims, numbers, index = _rows(at.input, [*[None] * dim, at.node._saved_index])
    own = at.owners_of_rows(n_dims)
    return None if own is None else _owned(at, n_dims, numbers[index], own)


def _owned(at: At, n_dims: int, picked: Tensor, own: Tensor) -> Layout | None:
    """Give rows of the input, by their numbers, to the owners of what was picked."""
    head = at.input[:n_dims]
    owners = torch.full((math.prod(head),), -1)
    known = own >= 0
    owners[picked[known]] = own[known]
    if bool((owners[picked] != own)[known].any()):  # several samples picked one
        return None
    return layout_of(owners.view(head), math.prod(at.input[n_dims:]), at.layout.n_samples)


def _rows(shape: tuple[int, ...], indices: Any) -> tuple[int, Tensor, tuple[Any, ...]]:
    """Number what the indexed dimensions number; return how many they are, and the index."""
    index = tuple(slice(None) if i is None else i.cpu() for i in indices)
    n_dims = sum(i.ndim if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in index)
    head = shape[:n_dims]
    return n_dims, torch.arange(math.prod(head)).view(head), index


def _written(at: At) -> Layout | None:
    """Rows were put, or added, at indices of the first input."""
    if at.index == 0:
        return at.layout if at.input == at.output else None
    dim = getattr(at.node, "_saved_dim", None)
    if dim is None:
        indices = at.node._saved_indices
    else:
        indices = [*[None] * (_signed(dim) % len(at.output)), at.node._saved_index]
    n_dims, _, index = _rows(at.output, indices)
    if at.dim >= n_dims:
        return at.along(at.dim - len(at.output) + len(at.input))
    own = at.owners_of_rows(n_dims)
    if own is None or at.input != (*own[index].shape, *at.output[n_dims:]):
        return None
    return layout_of(own[index], math.prod(at.output[n_dims:]), at.layout.n_samples)


def _grouped_product(at: At) -> Layout | None:
    """Each group of rows is multiplied by a matrix of its own."""
    return at.along(0) if at.index == 0 and at.dim == 0 else None


def _product(at: At, left: int = 0) -> Layout | None:
    """Product of the inputs ``left`` and ``left + 1``, plus the input before if there is one."""
    if at.index < left:
        return _pointwise(at)
    n = len(at.output)
    if len(at.input) != n or at.dim == (n - 1 if at.index == left else n - 2):
        return None  # the reduced dimension is shared by the samples
    return at.along(at.dim)


def _along_first_dim(at: At) -> Layout | None:
    """Samples lie along the first dimension of output and data, which nothing mixes."""
    return at.along(0) if at.index == 0 and at.dim == 0 else None


def _layer_normed(at: At) -> Layout | None:
    outer = len(at.output) - len(at.node._saved_normalized_shape)
    return at.along(at.dim) if at.index == 0 and at.dim < outer else None


def _batch_normed(at: At) -> Layout | None:
    if at.dim == 1:  # samples are channels, as in InstanceNorm
        return at.along(1 if at.index == 0 else 0)
    if at.node._saved_training:
        raise MixedSamplesError
    return at.along(at.dim) if at.index == 0 else None


def _pooled(at: At, n_spatial: int) -> Layout | None:
    """Treats each channel of each sample separately."""
    inside = at.index == 0 and at.dim < len(at.output) - n_spatial
    return at.along(at.dim) if inside else None


def _strided(at: At) -> Layout | None:
    """Means over images whose channels lie last, by ``adaptive_avg_pool2d(x, 1)``."""
    # Their shape is (N, C, 1, 1); they only get the strides that mark such tensors.
    c = at.input[1] if len(at.input) == 4 else 0
    is_mark = at.input[2:] == (1, 1) and tuple(at.node._saved_stride) == (c, 1, c, c)
    return at.layout if is_mark and at.input == at.output else None


def _attended(at: At) -> Layout | None:
    return at.along(at.dim) if at.index < 3 and at.dim in {0, 1} else None


def _shared(at: At) -> Layout | None:
    """Has no inputs except parameters."""
    return None


_NAMES: dict[Rule, str] = {
    _reshaped: "View UnsafeView ReshapeAlias Unsqueeze Squeeze Clone Alias ToCopy",
    _pointwise: (
        "Add Sub Rsub Mul Div Neg Pow Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Abs Sin Cos "
        "Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Sigmoid Relu LeakyRelu Elu Gelu Silu Mish "
        "Softplus Softshrink Hardshrink Hardtanh Hardswish Hardsigmoid LogSigmoid Threshold "
        "PreluKernel Clamp ClampMin ClampMax Maximum Minimum Where MaskedFill Erf Erfc Erfinv "
        "Reciprocal Square Sign Lerp Addcmul Addcdiv NativeDropout FusedDropout Expand Repeat "
        "Tril Triu Xlogy Logaddexp Round Floor Ceil NanToNum Copy MseLoss SmoothL1Loss HuberLoss "
        "BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss KlDiv"
    ),
    _over_saved_dims: (
        "Softmax LogSoftmax SafeSoftmax Cumsum Cumprod Logcumsumexp Cummax Cummin Sort Topk "
        "Gather Scatter ScatterAdd Glu Flip Roll"
    ),
    _sliced: "Slice Split SplitWithSizes",
    _padded: "ConstantPadNd",
    _reduced: "Sum Mean Logsumexp Amax Amin Var Std LinalgVectorNorm Norm Max Min Median Prod",
    _selected: "Select Unbind",
    _joined: "Cat Stack",
    _transposed: "Transpose",
    _permuted: "Permute",
    _matrix_transposed: "T",
    _indexed: "Index",
    _index_selected: "IndexSelect",
    _written: "IndexAdd IndexPut",
    _grouped_product: "GroupedMm",
    _strided: "AsStrided",
    partial(_product, left=1): "Addmm Baddbmm",
    _product: "Mm Bmm",
    _layer_normed: "NativeLayerNorm FusedRmsNorm",
    _batch_normed: "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm BatchNormWithUpdate",
    partial(_pooled, n_spatial=1): (
        "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D"
    ),
    partial(_pooled, n_spatial=2): (
        "MaxPool2DWithIndices AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D UpsampleNearest2D "
        "UpsampleBilinear2D UpsampleBicubic2D ReflectionPad2D ReplicationPad2D"
    ),
    partial(_pooled, n_spatial=3): (
        "MaxPool3DWithIndices AvgPool3D AdaptiveAvgPool3D AdaptiveMaxPool3D "
        "UpsampleNearest3D UpsampleTrilinear3D ReflectionPad3D ReplicationPad3D"
    ),
    _attended: (
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention "
        "ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention"
    ),
    _along_first_dim: (
        "Convolution NativeGroupNorm NllLoss NllLoss2D PixelShuffle PixelUnshuffle Im2Col Col2Im "
        "MarginsInPieces"
    ),
    _shared: "HeadOfMargins",
}


_RULES: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
# These only move entries, in more ways than their rules know.
_PROBED = {
    *("AsStrided", "Cat", "Stack", "Slice", "Split", "SplitWithSizes", "Select", "Unbind"),
    *("Flip", "Roll", "ConstantPadNd"),
}
# These need positions alone, so that samples may be spread over several dimensions.
_BY_POSITION = {_reshaped, _pointwise, _strided, _indexed, _written}


def input_layouts(edges: list[Edge], outputs: dict[int, Layout]) -> list[Layout | None]:
    """Return the layouts of an operation's inputs, all its edges, from those of its used outputs.

    A layout is None if samples share the input, or if it is unknown. There are two samples at
    least. Statistics over the samples raise a ``MixedSamplesError``.
    """
    if not edges:
        return []
    layouts = [_by_rule(edge, outputs) for edge in edges]
    name = name_of(edges[0].user)
    is_unknown = name not in _RULES or (name in _PROBED and None in layouts)
    # What takes parameters would be differentiated again for each sample: an RNN's kernel, say.
    has_parameters = any(leaf_of(edge.node) is not None for edge in edges)
    if is_unknown and (is_function(edges[0].user) or not has_parameters):
        return probed_layouts(edges, outputs)
    return layouts


def _by_rule(edge: Edge, outputs: dict[int, Layout]) -> Layout | None:
    """Return what the rules say; users that disagree mix samples."""
    rule = _RULES.get(name_of(edge.user))
    if rule is None:
        return None
    shape = shape_of(edge.node, edge.number)
    answers = []
    for number, layout in outputs.items():
        output = shape_of(edge.user, number)
        if rule not in _BY_POSITION and locate(output, layout) is None:
            layout = guessed(layout)
        dim, width = locate(output, layout) or (-1, 0)
        known = dim >= 0 or rule in _BY_POSITION
        at = At(edge.user, edge.index, output, shape, layout, dim, width)
        answers.append(rule(at) if known else None)
    return reduce(joined, answers)
