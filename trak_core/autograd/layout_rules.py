"""Derive the layout of an operation's input from that of its output, operation by operation.

A rule may only answer with a layout if every entry of the output depends on entries of the input
that belong to the same sample. The answer for an operation that isn't listed is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from trak_core.autograd.graph import Edge, Layout, Node, layout_at, locate, name_of, shape_of


class MixedSamplesError(Exception):
    """An operation takes statistics over samples that are said to be independent."""


@dataclass(frozen=True, slots=True)
class At:
    """One input of one operation, by its number and shape, and the layout of one of its outputs.

    Samples lie in the output's dimension ``dim`` (-1 if they are spread over several), with
    ``width`` consecutive places each.
    """

    node: Node
    index: int
    output: tuple[int, ...]
    input: tuple[int, ...]
    layout: int
    n_samples: int
    dim: int
    width: int

    def along(self, dim: int) -> Layout:
        """Return the layout of an input with the samples along ``dim``, in the same order."""
        same_size = 0 <= dim < len(self.input) and self.input[dim] == self.output[self.dim]
        return layout_at(self.input, dim, self.width, self.n_samples) if same_size else None

    def saved_dims(self, n_dims: int) -> set[int]:
        """Return the dimensions that the operation was given, all of ``n_dims`` if none."""
        saved = getattr(self.node, "_saved_dim", getattr(self.node, "_saved_dims", None))
        values = range(n_dims) if saved is None else saved if isinstance(saved, tuple) else (saved,)
        return {_signed(v) % n_dims for v in values} or set(range(n_dims))


def _signed(dim: int) -> int:
    """Undo that negative dimensions come back from the graph as unsigned 64-bit numbers."""
    return dim - 2**64 if dim >= 2**63 else dim


Rule = Callable[[At], Layout]


def _reshaped(at: At) -> Layout:
    return at.layout


def _pointwise(at: At) -> Layout:
    if at.dim >= 0:
        return at.along(at.dim - len(at.output) + len(at.input))
    return at.layout if at.input == at.output else None  # no broadcasting: positions stay


def _over_saved_dims(at: At) -> Layout:
    """Mixes entries along the dimensions that the operation was given, and no others."""
    return None if at.dim in at.saved_dims(len(at.output)) else at.along(at.dim)


def _sliced(at: At) -> Layout:
    """Changes the number of places along dimensions without samples."""
    return at.along(at.dim) if len(at.input) == len(at.output) else None


def _padded(at: At) -> Layout:
    pad = at.node._saved_pad
    behind = len(at.output) - 1 - at.dim
    return None if any(pad[2 * behind : 2 * behind + 2]) else at.along(at.dim)


def _reduced(at: At) -> Layout:
    """Sums, means and other reductions over given dimensions."""
    gone = at.saved_dims(len(at.input))
    if getattr(at.node, "_saved_keepdim", False):
        return None if at.dim in gone else at.along(at.dim)
    kept = [dim for dim in range(len(at.input)) if dim not in gone]
    return at.along(kept[at.dim]) if at.dim < len(kept) == len(at.output) else None


def _selected(at: At) -> Layout:
    """One dimension fewer in the output than in the input."""
    (gone,) = at.saved_dims(len(at.input))
    return at.along(at.dim + (at.dim >= gone))


def _joined(at: At) -> Layout:
    (dim,) = at.saved_dims(len(at.output))
    if at.dim == dim:
        return None
    return at.along(at.dim - (at.dim > dim) if len(at.input) < len(at.output) else at.dim)


def _transposed(at: At) -> Layout:
    a, b = (_signed(d) % len(at.output) for d in (at.node._saved_dim0, at.node._saved_dim1))
    return at.along({a: b, b: a}.get(at.dim, at.dim))


def _permuted(at: At) -> Layout:
    return at.along(_signed(at.node._saved_dims[at.dim]) % len(at.output))


def _matrix_transposed(at: At) -> Layout:
    return at.along(1 - at.dim) if len(at.output) == 2 else at.layout


def _indexed(at: At) -> Layout:
    """Try each dimension of the input: does every entry come from its own sample?"""
    indices = at.node._saved_indices
    device = next(index.device for index in indices if index is not None)
    own = torch.arange(at.layout * at.n_samples, device=device) // at.layout
    index = tuple(slice(None) if i is None else i for i in indices)
    for dim in range(len(at.input)):
        layout = layout_at(at.input, dim, 1, at.n_samples)
        if layout is not None and at.input[dim] == at.n_samples:
            shape = [-1 if d == dim else 1 for d in range(len(at.input))]
            samples = torch.arange(at.n_samples, device=device).reshape(shape).expand(at.input)
            picked = samples[index]
            if picked.shape == at.output and bool((picked.reshape(-1, len(own)) == own).all()):
                return layout
    return None


def _product(at: At, left: int = 0) -> Layout:
    """Product of the inputs ``left`` and ``left + 1``, plus the input before if there is one."""
    if at.index < left:
        return _pointwise(at)
    n = len(at.output)
    if len(at.input) != n or at.dim == (n - 1 if at.index == left else n - 2):
        return None  # the reduced dimension is shared by the samples
    return at.along(at.dim)


def _along_first_dim(at: At) -> Layout:
    """Samples lie along the first dimension of output and data, which nothing mixes."""
    return at.along(0) if at.index == 0 and at.dim == 0 else None


def _layer_normed(at: At) -> Layout:
    outer = len(at.output) - len(at.node._saved_normalized_shape)
    return at.along(at.dim) if at.index == 0 and at.dim < outer else None


def _batch_normed(at: At) -> Layout:
    if at.dim == 1:  # samples are channels, as in InstanceNorm
        return at.along(1 if at.index == 0 else 0)
    if at.node._saved_training:
        raise MixedSamplesError
    return at.along(at.dim) if at.index == 0 else None


def _pooled(at: At, n_spatial: int) -> Layout:
    """Treats each channel of each sample separately."""
    inside = at.index == 0 and at.dim < len(at.output) - n_spatial
    return at.along(at.dim) if inside else None


def _strided(at: At) -> Layout:
    """Serve what ``adaptive_avg_pool2d(x, 1)`` leaves where channels lie last: other strides alone.

    torch gives the mean of shape (N, C, 1, 1) the strides that mark such tensors.
    """
    n, c, *ones = at.output
    is_mark = ones == [1, 1] and tuple(at.node._saved_stride) == (c, 1, c, c)
    return at.layout if is_mark and at.input == at.output else None


def _attended(at: At) -> Layout:
    return at.along(at.dim) if at.index < 3 and at.dim in {0, 1} else None


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
        "Gather IndexSelect Glu Flip Roll"
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
        "Convolution NativeGroupNorm NllLoss NllLoss2D PixelShuffle PixelUnshuffle Im2Col Col2Im"
    ),
}


_RULES: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
# These need positions alone, so that samples may be spread over several dimensions.
_BY_POSITION = {_reshaped, _pointwise, _strided}


def input_layout(edge: Edge, number: int, layout: int, n_samples: int) -> Layout:
    """Return an input's layout from that of output ``number`` of the operation ``edge.user``.

    It is None if samples share the input, or if it is unknown. ``n_samples`` is at least 2.
    Statistics over the samples raise a ``MixedSamplesError``.
    """
    rule = _RULES.get(name_of(edge.user))
    if rule is None:
        return None
    output = shape_of(edge.user, number)
    dim, width = locate(output, layout, n_samples) or (-1, 0)
    if dim < 0 and rule not in _BY_POSITION:
        return None
    shape = shape_of(edge.node, edge.number)
    return rule(At(edge.user, edge.index, output, shape, layout, n_samples, dim, width))
