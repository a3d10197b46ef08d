"""Compute the margins of a text's tokens, and their gradients, without storing all logits.

The margin of token t with label y is m_t = z_ty - logsumexp_{v != y} z_tv, with logits z_t = W h_t
+ b. T tokens have T x V logits, where V is the size of the vocabulary. Autograd would store all of
these logits for the backward pass. The functions of this module compute logits for some tokens at a
time, and compute them again in the backward pass, which uses the derivatives ("slopes")

    dm_t/dz_tv = 1 if v = y, else -exp(z_tv - logsumexp_{u != y} z_tu).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from trak_core.gradients.gradient_terms import Contribution, Dense, Outer, pieces
from trak_core.model_outputs.model_output import at_least_float32


@dataclass(frozen=True, slots=True)
class Head:
    """A model's last layer: a linear layer, followed by elementwise functions such as a softcap."""

    weight: Tensor  # shape (V, d)
    bias: Tensor | None  # shape (V,)
    functions: Sequence[Callable[[Tensor], Tensor]] = ()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.then(linear(hidden, self.weight, self.bias))

    def then(self, x: Tensor) -> Tensor:
        for function in self.functions:
            x = function(x)
        return x

    def slopes(
        self, rows: "Rows", part: slice | Tensor, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Return the derivatives of tokens' margins with respect to outputs of the linear layer.

        ``part`` selects some of the tokens in ``rows``. The derivatives are those with respect to
        the outputs for classes first, ..., last - 1, shape (tokens, last - first).
        """
        bias = None if self.bias is None else self.bias[first:last]
        x = linear(rows.hidden[part], self.weight[first:last], bias)
        with torch.enable_grad():
            x.requires_grad_(bool(self.functions))
            logits = self.then(x)
        slopes = at_least_float32(logits.detach())
        others = rows.others[part, None]
        # The derivatives of ``functions`` may need their results, the logits, which autograd has
        # saved. In this case, the logits must not be overwritten.
        slopes = slopes - others if self.functions else slopes.sub_(others)
        slopes.exp_().neg_()
        # Indexing with a boolean mask instead of ``gather`` would make the CPU wait for the GPU.
        own = rows.labels[part, None] - first
        column = own.clamp(0, slopes.shape[1] - 1)
        slopes.scatter_(1, column, slopes.gather(1, column).masked_fill_(own == column, 1))
        slopes = slopes.to(logits.dtype)
        return torch.autograd.grad(logits, x, slopes)[0] if self.functions else slopes


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of all texts, one text after another, with the last layer's inputs and labels."""

    hidden: Tensor  # the layer's inputs h, shape (tokens, d)
    labels: Tensor  # classes, shape (tokens,)
    others: Tensor  # logsumexp of the logits of all classes other than the label, shape (tokens,)


def margins_of_tokens(hidden: Tensor, labels: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return the margins of labels, and whether each label is the predicted class.

    The margins equal those of ``model_outputs.supervised.margin`` up to rounding. ``hidden``, shape
    (batch, tokens, d), contains the inputs of the last layer ``head``. Labels and both results have
    shape (batch, tokens). To save memory, at most ``max_piece_entries`` logits, or the logits of
    one token, are computed at a time.
    """
    bias = None if head.bias is None else head.bias.detach()
    fixed = Head(head.weight.detach(), bias, head.functions)
    margins, others, is_right = MarginsInPieces.apply(hidden, labels, fixed)
    trained = [t for t in (head.weight, head.bias) if t is not None and t.requires_grad]
    if trained and torch.is_grad_enabled():
        rows = Rows(hidden.detach().flatten(0, 1), labels.flatten(), others)
        # The layer's parameters get a separate node in the graph. ``by_samples`` doesn't run this
        # node, whose result would be summed over samples, but computes per-sample gradients itself.
        margins = margins + HeadOfMargins.apply(head.weight, head.bias, fixed, rows, margins.shape)
    return margins, is_right


class MarginsInPieces(torch.autograd.Function):
    """The margins as a function of the last layer's inputs. The parameters are constants."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, hidden: Tensor, labels: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat, own_class = hidden.flatten(0, 1), labels.flatten()
        # All results are written to the same few tensors. If each piece had new tensors, they would
        # lie between the freed blocks of logits and fragment the memory.
        like = head.logits(flat[:0])
        margins = at_least_float32(like).new_empty(len(flat))
        others, is_right = torch.empty_like(margins), torch.empty_like(own_class, dtype=torch.bool)
        for part in pieces(len(flat), len(head.weight), flat.device):
            logits = head.logits(flat[part])
            classes = own_class[part, None]
            torch.eq(logits.argmax(-1), own_class[part], out=is_right[part])
            logits = at_least_float32(logits)
            margins[part] = logits.gather(1, classes).squeeze(1)
            others[part] = logits.scatter_(1, classes, -torch.inf).logsumexp(1)
        margins -= others
        ctx.save_for_backward(flat, own_class, others)
        ctx.head, ctx.shape = head, hidden.shape
        ctx.mark_non_differentiable(others, is_right)
        return margins.view(labels.shape), others, is_right.view(labels.shape)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradients: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        rows = Rows(*ctx.saved_tensors)
        factors = gradients.reshape(-1, 1)
        result = torch.empty_like(rows.hidden)
        for part in pieces(len(result), len(ctx.head.weight), result.device):
            slopes = ctx.head.slopes(rows, part)
            slopes *= factors[part].to(slopes.dtype)
            torch.mm(slopes, ctx.head.weight, out=result[part])
        return result.view(ctx.shape), None, None


class HeadOfMargins(torch.autograd.Function):
    """A function with value 0 and the margins' derivatives with respect to the layer's parameters.

    ``MarginsInPieces`` treats the parameters as constants. When this function is added to the
    margins, they get the missing derivatives.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        rows: Rows,
        shape: tuple[int, ...],
    ) -> Tensor:
        ctx.save_for_backward(rows.hidden, rows.labels, rows.others)
        ctx.head = head
        return rows.others.new_zeros(shape)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        # Autograd needs sums of gradients over texts, so all texts are treated as one sample.
        factors, weight = head_factors(ctx, gradients.reshape(1, 1, -1)), None
        if ctx.needs_input_grad[0]:
            weight = torch.empty_like(ctx.head.weight)
            for part in pieces(len(weight), weight.shape[1], weight.device):
                weight[part] = factors.part(part.start, part.stop).view_as(weight[part])
        bias = factors.bias_factors().gradients.flatten() if ctx.needs_input_grad[1] else None
        return weight, bias, None, None, None


def head_factors(node: Any, gradients: Tensor) -> "MarginFactors":
    """Return the gradients of the last layer's weight, given those with respect to the margins.

    ``node`` is the node of ``HeadOfMargins``. ``gradients`` has shape (C, B, tokens).
    """
    return MarginFactors(gradients, Rows(*node.saved_tensors), node.head)


@dataclass(frozen=True, slots=True)
class MarginFactors(Contribution):
    """Gradients of the last layer's weight, dW_i = sum_t delta_t slopes_t h_t^T.

    dW_i is computed only when it is needed. ``gradients`` is delta, the gradients with respect to
    margins, shape (C, B, tokens). slopes_t contains the derivatives of token t's margin with
    respect to the layer's outputs, and h_t the layer's inputs. ``rows`` contains all tokens.
    """

    rows: Rows
    head: Head

    @property
    def matrix(self) -> tuple[int, int]:
        return len(self.head.weight), self.head.weight.shape[1]

    @property
    def n_tokens(self) -> int:
        return self.gradients.shape[2]

    def part(self, first: int, last: int) -> Tensor:
        (n_each, n_samples, _), width = self.gradients.shape, self.matrix[1]
        total = self.rows.others.new_zeros(n_each, n_samples, last - first, width)
        for sample in range(n_samples):
            start = sample * self.n_tokens
            for part in pieces(self.n_tokens, last - first, total.device):
                tokens = slice(start + part.start, start + part.stop)
                slopes = self.head.slopes(self.rows, tokens, first, last)
                hidden = self.rows.hidden[tokens]
                for i in range(n_each):
                    factors = self.gradients[i, sample, part, None].to(slopes.dtype)
                    # Pieces are summed in the dtype of ``total``, which is at least float32.
                    total[i, sample] += (slopes * factors).T @ hidden
        return total.to(self.head.weight.dtype).reshape(self.n_rows, -1)

    def outers(self) -> Iterator[Outer]:
        """Yield the terms delta_t slopes_t h_t^T for some tokens at a time, as outer products."""
        n_samples = self.gradients.shape[1]
        hidden = self.rows.hidden.view(n_samples, self.n_tokens, -1)
        numbers = torch.arange(len(self.rows.labels), device=hidden.device).view(n_samples, -1)
        for part in pieces(self.n_tokens, n_samples * len(self.head.weight), hidden.device):
            own = numbers[:, part]
            slopes = self.head.slopes(self.rows, own.flatten())
            slopes = slopes.view(*own.shape, -1)
            gradients = slopes * self.gradients[:, :, part, None].to(slopes.dtype)
            yield Outer(gradients, hidden[:, part], is_transposed=True)

    def bias_factors(self) -> "BiasFactors":
        """Return the gradients of the layer's bias, db_i = sum_t delta_t slopes_t."""
        sums = [at_least_float32(outer.gradients).sum(2) for outer in self.outers()]
        return BiasFactors(torch.stack(sums).sum(0).to(self.head.weight.dtype), weight_factors=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasFactors(Dense):
    """Gradients of the last layer's bias. The tokens' terms are computed only when needed."""

    weight_factors: MarginFactors

    def outers(self) -> Iterator[Outer]:
        """Yield the terms delta_t slopes_t for some tokens at a time, as outer products with 1."""
        for outer in self.weight_factors.outers():
            ones = outer.inputs.new_ones(*outer.inputs.shape[:2], 1)
            yield Outer(outer.gradients, ones, is_transposed=True)
