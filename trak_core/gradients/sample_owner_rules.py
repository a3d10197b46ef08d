"""Rules that derive the layout of an operation's input from the layout of its output.

A layout assigns the entries of a tensor to samples (``graph.py``). A rule returns the layout of an
input if no output entry of one sample depends on input entries of another sample. Otherwise, the
rule returns None, which means that samples share the input. Operations without a rule are
differentiated with test gradients (``graph.probed_layouts``).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from trak_core.gradients.graph import (
    Edge,
    Layout,
    Node,
    UnreadableGraphError,
    combined,
    completed,
    is_function,
    layout_of,
    leaf_of,
    locate,
    name_of,
    probed_layouts,
    shape_of,
    stride_at,
)


class MixedSamplesError(UnreadableGraphError):
    """An operation computes statistics, such as a mean, over samples that must be independent."""


@dataclass(frozen=True, slots=True)
class RuleInput:
    """The argument of a rule: an input of an operation, and an output with its layout.

    ``input`` and ``output`` are the shapes of these two tensors. The samples lie along the output's
    dimension ``dim``, with ``width`` consecutive indices for each sample. ``dim`` is -1 if the
    samples lie along several dimensions.
    """

    node: Node
    index: int  # number of the input
    output: tuple[int, ...]
    input: tuple[int, ...]
    layout: Layout
    dim: int
    width: int

    def along(self, dim: int) -> Layout | None:
        """Return the layout of an input in which the samples lie along dimension ``dim``.

        Return None if this dimension and the output's ``self.dim`` differ in size.
        """
        if not (0 <= dim < len(self.input) and self.input[dim] == self.output[self.dim]):
            return None
        stride = stride_at(self.input, dim, self.width, self.layout.period)
        return None if stride is None else replace(self.layout, stride=stride)

    def owners_of_rows(self, n_dims: int) -> Tensor | None:
        """Return the sample number of each row of the output, or None if a row has several samples.

        Rows are indexed by the output's first ``n_dims`` dimensions, whose shape the result has.
        """
        tail = math.prod(self.output[n_dims:])
        if self.layout.stride % tail:
            return None
        head = self.output[:n_dims]
        return self.layout.owners_of_blocks(tail, math.prod(head)).view(head)

    def saved_dims(self, n_dims: int) -> set[int]:
        """Return which of ``n_dims`` dimensions the operation's argument ``dim`` selects."""
        saved = getattr(self.node, "_saved_dim", getattr(self.node, "_saved_dims", None))
        values = range(n_dims) if saved is None else saved if isinstance(saved, tuple) else (saved,)
        return {_signed(v) % n_dims for v in values} or set(range(n_dims))


def _signed(dim: int) -> int:
    """Return a dimension as a signed number. Autograd's graph stores it as an unsigned number."""
    return dim - 2**64 if dim >= 2**63 else dim


Rule = Callable[[RuleInput], Layout | None]


def _reshaped(given: RuleInput) -> Layout | None:
    return given.layout


def _pointwise(given: RuleInput) -> Layout | None:
    if given.dim >= 0:
        return given.along(given.dim - len(given.output) + len(given.input))
    return given.layout if given.input == given.output else None  # None if the input is broadcast


def _repeated(given: RuleInput) -> Layout | None:
    """Rule for an operation that repeats the whole input, or entries within each sample."""
    n_entries, turn = math.prod(given.input), given.layout.stride * given.layout.period
    n_trailing = max(0, len(given.input) - 1)
    is_whole = given.output[len(given.output) - n_trailing :] == given.input[1:]
    return given.layout if is_whole and n_entries % turn == 0 else _pointwise(given)


def _over_saved_dims(given: RuleInput) -> Layout | None:
    """Rule for an operation that only mixes entries along its argument ``dim``, such as softmax."""
    return None if given.dim in given.saved_dims(len(given.output)) else given.along(given.dim)


def _sliced(given: RuleInput) -> Layout | None:
    """Rule for an operation that shortens dimensions along which no samples lie."""
    return given.along(given.dim) if len(given.input) == len(given.output) else None


def _padded(given: RuleInput) -> Layout | None:
    pad = given.node._saved_pad
    from_last = len(given.output) - 1 - given.dim
    return None if any(pad[2 * from_last : 2 * from_last + 2]) else given.along(given.dim)


def _reduced(given: RuleInput) -> Layout | None:
    """Rule for an operation that reduces over its argument ``dim``, such as a sum."""
    gone = given.saved_dims(len(given.input))
    if getattr(given.node, "_saved_keepdim", False):
        return None if given.dim in gone else given.along(given.dim)
    kept = [dim for dim in range(len(given.input)) if dim not in gone]
    return given.along(kept[given.dim]) if given.dim < len(kept) == len(given.output) else None


def _selected(given: RuleInput) -> Layout | None:
    """Rule for an operation that removes its argument ``dim`` from the input's dimensions."""
    (gone,) = given.saved_dims(len(given.input))
    return given.along(given.dim + (given.dim >= gone))


def _joined(given: RuleInput) -> Layout | None:
    (dim,) = given.saved_dims(len(given.output))
    is_new = len(given.input) < len(given.output)  # as in ``stack``
    return None if given.dim == dim else given.along(given.dim - (is_new and given.dim > dim))


def _transposed(given: RuleInput) -> Layout | None:
    n, dims = len(given.output), (given.node._saved_dim0, given.node._saved_dim1)
    a, b = (_signed(dim) % n for dim in dims)
    return given.along({a: b, b: a}.get(given.dim, given.dim))


def _permuted(given: RuleInput) -> Layout | None:
    return given.along(_signed(given.node._saved_dims[given.dim]) % len(given.output))


def _matrix_transposed(given: RuleInput) -> Layout | None:
    return given.along(1 - given.dim) if len(given.output) == 2 else given.layout


def _indexed(given: RuleInput) -> Layout | None:
    """Rule for the selection of rows. A row belongs to the sample to which its copy belongs."""
    n_dims, row_numbers, index = _rows(given.input, given)
    picked = row_numbers[index]
    if given.dim >= picked.ndim:  # the samples lie along dimensions that aren't indexed
        return given.along(given.dim - picked.ndim + n_dims)
    owners = given.owners_of_rows(picked.ndim)
    return None if owners is None else _of_picked(given, n_dims, picked, owners)


def _index_selected(given: RuleInput) -> Layout | None:
    is_over_samples = given.dim in given.saved_dims(len(given.output))
    return _indexed(given) if is_over_samples else given.along(given.dim)


def _of_picked(given: RuleInput, n_dims: int, picked: Tensor, owners: Tensor) -> Layout | None:
    """Return the layout of an input from which an operation selects rows.

    ``picked`` contains the numbers of the selected rows, and ``owners`` the samples to which their
    copies in the output belong.
    """
    head = given.input[:n_dims]
    input_owners = torch.full((math.prod(head),), -1)
    known = owners >= 0
    input_owners[picked[known]] = owners[known]
    if bool((input_owners[picked] != owners)[known].any()):  # several samples select one row
        return None
    n_entries = math.prod(given.input[n_dims:])
    return layout_of(input_owners.view(head), n_entries, given.layout.n_samples)


def _rows(shape: tuple[int, ...], given: RuleInput) -> tuple[int, Tensor, tuple[Any, ...]]:
    """Return the index by which an operation selects rows of a tensor of the given shape.

    Returns:
        The number of indexed dimensions, the row numbers in the shape of these dimensions, and the
        index. The operation selects the rows ``row_numbers[index]``.
    """
    dim = getattr(given.node, "_saved_dim", None)
    if dim is None:
        indices = given.node._saved_indices
    else:
        indices = [*[None] * (_signed(dim) % len(shape)), given.node._saved_index]
    index = tuple(slice(None) if i is None else i.cpu() for i in indices)
    n_dims = sum(i.ndim if isinstance(i, Tensor) and i.dtype is torch.bool else 1 for i in index)
    head = shape[:n_dims]
    return n_dims, torch.arange(math.prod(head)).view(head), index


def _written(given: RuleInput) -> Layout | None:
    """Rule for an operation that writes input 1 into rows of input 0, or adds it to these rows."""
    if given.index == 0:
        return given.layout if given.input == given.output else None
    n_dims, _, index = _rows(given.output, given)
    if given.dim >= n_dims:
        return given.along(given.dim - len(given.output) + len(given.input))
    owners = given.owners_of_rows(n_dims)
    if owners is None or given.input != (*owners[index].shape, *given.output[n_dims:]):
        return None
    return layout_of(owners[index], math.prod(given.output[n_dims:]), given.layout.n_samples)


def _product(given: RuleInput, left: int = 0) -> Layout | None:
    """Rule for matrix products: A B or, if ``left`` is 1, C + A B, where C is input 0."""
    if given.index < left:
        return _pointwise(given)
    n = len(given.output)
    if len(given.input) != n or given.dim == (n - 1 if given.index == left else n - 2):
        return None  # samples lie along the other factor's dimension
    return given.along(given.dim)


def _along_first_dim(given: RuleInput) -> Layout | None:
    """Rule for an operation that treats each index of the first dimension separately."""
    return given.along(0) if given.index == 0 and given.dim == 0 else None


def _layer_normed(given: RuleInput) -> Layout | None:
    outer = len(given.output) - len(given.node._saved_normalized_shape)
    return given.along(given.dim) if given.index == 0 and given.dim < outer else None


def _batch_normed(given: RuleInput) -> Layout | None:
    if given.dim == 1:  # samples are channels, as in InstanceNorm
        return given.along(1 if given.index == 0 else 0)
    if given.node._saved_training:
        raise MixedSamplesError("has batch normalization over samples")
    return given.along(given.dim) if given.index == 0 else None


def _pooled(given: RuleInput) -> Layout | None:
    """Rule for an operation, such as ``MaxPool2D``, that treats each channel separately."""
    n_spatial = int(name_of(given.node).partition("D")[0][-1])
    is_channel = given.index == 0 and given.dim < len(given.output) - n_spatial
    return given.along(given.dim) if is_channel else None


def _strided(given: RuleInput) -> Layout | None:
    """Rule for ``as_strided`` if it only sets channels-last strides, as in adaptive pooling."""
    # For the shape (N, C, 1, 1), these strides don't move entries. Other strides may move them.
    c = given.input[1] if len(given.input) == 4 else 0
    keeps_entries = given.input[2:] == (1, 1) and tuple(given.node._saved_stride) == (c, 1, c, c)
    return given.layout if keeps_entries and given.input == given.output else None


def _attended(given: RuleInput) -> Layout | None:
    """Rule for attention: inputs are queries, keys, values and, on a GPU, a bias for the logits."""
    return given.along(given.dim) if given.index < 4 and given.dim in {0, 1} else None


def _shared(given: RuleInput) -> Layout | None:
    return None  # all inputs are parameters, which samples share


_NAMES: dict[Rule, str] = {
    _reshaped: "View UnsafeView ReshapeAlias Unsqueeze Squeeze Clone Alias ToCopy",
    _pointwise: (
        "Add Sub Rsub Mul Div Neg Pow Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Abs Sin Cos "
        "Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Sigmoid Relu LeakyRelu Elu Gelu Silu Mish "
        "Softplus Softshrink Hardshrink Hardtanh Hardswish Hardsigmoid LogSigmoid Threshold "
        "PreluKernel Clamp ClampMin ClampMax Maximum Minimum Where MaskedFill Erf Erfc Erfinv "
        "Reciprocal Square Sign Lerp Addcmul Addcdiv NativeDropout FusedDropout Expand "
        "Tril Triu Xlogy Logaddexp Round Floor Ceil NanToNum Copy MseLoss SmoothL1Loss HuberLoss "
        "BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss KlDiv"
    ),
    _repeated: "Repeat",
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
    _strided: "AsStrided",
    partial(_product, left=1): "Addmm Baddbmm",
    _product: "Mm Bmm",
    _layer_normed: "NativeLayerNorm FusedRmsNorm",
    _batch_normed: "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm BatchNormWithUpdate",
    _pooled: (
        "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D MaxPool2DWithIndices "
        "AvgPool2D AdaptiveAvgPool2D AdaptiveMaxPool2D UpsampleNearest2D UpsampleBilinear2D "
        "UpsampleBicubic2D ReflectionPad2D ReplicationPad2D MaxPool3DWithIndices AvgPool3D "
        "AdaptiveAvgPool3D AdaptiveMaxPool3D UpsampleNearest3D UpsampleTrilinear3D "
        "ReflectionPad3D ReplicationPad3D"
    ),
    _attended: (
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention "
        "ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention"
    ),
    _along_first_dim: (
        "Convolution GroupedMm NativeGroupNorm NllLoss NllLoss2D PixelShuffle PixelUnshuffle "
        "Im2Col Col2Im MarginsInPieces"
    ),
    _shared: "HeadOfMargins",
}
_RULES: dict[str, Rule] = {name: rule for rule, names in _NAMES.items() for name in names.split()}
# Operations that only move entries. If their rule returns None, it may still be possible to tell
# samples apart, so the operation is differentiated with test gradients (``probed_layouts``).
_PROBED_IF_NONE = {
    *("AsStrided", "Cat", "Stack", "Slice", "Split", "SplitWithSizes", "Select", "Unbind"),
    *("Flip", "Roll", "ConstantPadNd"),
}
# Rules whose results depend on indices that the operation has saved. If a backward plan uses one of
# these rules, the plan can't be reused for another batch.
_BY_VALUE = {_indexed, _index_selected, _written}
# Rules that also apply if samples lie along several dimensions of the output.
_BY_POSITION = {_reshaped, _pointwise, _repeated, _strided, _indexed, _written}


def input_layouts(
    edges: list[Edge], outputs: dict[int, Layout]
) -> tuple[list[Layout | None], bool]:
    """Return the layouts of an operation's inputs, given those of the operation's outputs.

    The first result contains a layout for each edge, or None if samples share the input. The second
    result is False if the layouts depend on saved values, and True if all graphs with an equal
    ``signature`` have these layouts. The batch must have several samples. A ``MixedSamplesError``
    is raised if the operation computes statistics over samples.
    """
    if not edges:
        return [], True
    layouts = [_by_rule(edge, outputs) for edge in edges]
    name = name_of(edges[0].user)
    is_unknown = name not in _RULES or (name in _PROBED_IF_NONE and None in layouts)
    # If an operation of torch without a rule takes parameters, as the kernel of an RNN does, it
    # will be differentiated once for each sample in any case. Test gradients would only cost time.
    has_parameters = any(leaf_of(edge.node) is not None for edge in edges)
    if is_unknown and (is_function(edges[0].user) or not has_parameters):
        return probed_layouts(edges, outputs), False
    return layouts, _RULES.get(name) not in _BY_VALUE


def _by_rule(edge: Edge, outputs: dict[int, Layout]) -> Layout | None:
    rule = _RULES.get(name_of(edge.user))
    if rule is None:
        return None
    shape = shape_of(edge.node, edge.number)
    answers = []
    for number, layout in outputs.items():
        output = shape_of(edge.user, number)
        if rule not in _BY_POSITION and locate(output, layout) is None:
            layout = completed(layout)
        dim, width = locate(output, layout) or (-1, 0)
        known = dim >= 0 or rule in _BY_POSITION
        given = RuleInput(edge.user, edge.index, output, shape, layout, dim, width)
        answers.append(rule(given) if known else None)
    return reduce(combined, answers)
