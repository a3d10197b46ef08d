"""Compute the logits of a language model for a few tokens at a time, to save memory.

The last layer of the model is linear, with one row of weights for each vocabulary entry. While the
model is called, this layer returns a placeholder. Logits are computed later from the placeholder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from trak_core.gradients.margins_in_pieces import Head, margins_of_tokens
from trak_core.gradients.model_inputs import without_virtual_tokens
from trak_core.model_outputs.language_modelling import of_margins
from trak_core.model_outputs.model_output import IGNORED, ModelOutput
from trak_core.model_outputs.supervised import margin

# Entrywise functions that models apply to logits, such as scaling and soft capping.
_ENTRYWISE = {"mul", "__mul__", "__rmul__", "div", "__div__", "__truediv__", "true_divide"}
_ENTRYWISE |= {"tanh", "float", "to", "contiguous"}
# Functions that read only the shape and dtype of a tensor.
_READ_SHAPE = {"__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "__len__"}


class _LogitsNeededError(Exception):
    """Raised if a model needs the values of its logits, which a placeholder does not contain."""


class DeferredLogits(Tensor):
    """A placeholder for logits of shape (..., vocabulary size), which are not computed yet.

    ``hidden`` contains the inputs of the model's last layer. ``head`` contains this layer's weights
    and the entrywise functions that the model applies to its logits. Slicing rows or applying an
    entrywise function returns another placeholder. The shape and dtype can be read. All other
    operations raise ``_LogitsNeededError``, because they need the logits or might write into them.
    """

    head: Head
    hidden: Tensor

    @staticmethod
    def of(hidden: Tensor, head: Head) -> "DeferredLogits":
        """Return a placeholder for the logits that ``head`` computes from ``hidden`` (..., d)."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            like = head.logits(hidden.new_empty(0, hidden.shape[-1]))
        shape = (*hidden.shape[:-1], len(head.weight))
        logits = Tensor._make_wrapper_subclass(
            DeferredLogits, shape, dtype=like.dtype, device=like.device
        )
        logits.head, logits.hidden = head, hidden
        return logits

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if isinstance(logits, DeferredLogits):
            if func.__name__ in _READ_SHAPE:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            others = (*args[1:], *kwargs.values())
            if func.__name__ in _ENTRYWISE and not any(isinstance(o, Tensor) for o in others):
                functions = *logits.head.functions, lambda x: func(x, *args[1:], **kwargs)
                head = replace(logits.head, functions=functions)
                return DeferredLogits.of(logits.hidden, head)
            if func.__name__ == "__getitem__" and logits._are_rows(args[1]):
                with torch._C.DisableTorchFunctionSubclass():
                    return DeferredLogits.of(logits.hidden[args[1]], logits.head)
        raise _LogitsNeededError

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations such as ``logits.data`` call this method instead of ``__torch_function__``.
        raise _LogitsNeededError

    def _are_rows(self, index: Any) -> bool:
        """Return whether an index slices rows, but keeps all vocabulary entries of a row."""
        parts = index if isinstance(index, tuple) else (index,)
        n_dims = self.hidden.ndim - 1
        return len(parts) <= n_dims and all(isinstance(part, slice) for part in parts)


class _Defers(TorchFunctionMode):
    """A torch mode in which linear layers with ``n_classes`` outputs return ``DeferredLogits``."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.n_classes = n_classes

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (self._linear if func is linear else func)(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_head = len(weight) == self.n_classes and weight.is_leaf and input.ndim == 3
        if is_head and not torch.is_autocast_enabled(input.device.type):
            return DeferredLogits.of(input, Head(weight, bias))
        return linear(input, weight, bias)


class MarginsOfTokens(nn.Module):
    """A wrapper of a language model that returns the log-odds of labels instead of logits.

    It takes the model's arguments and ``labels``, and returns a tensor of shape (batch, tokens, 2).
    For each label, the tensor contains the log-odds, which are also called margin, and 1 if the
    label is the most likely token, else 0. If the model does not end in a linear layer and
    entrywise functions, all logits are computed together.

    Attributes:
        output: The model output f, computed from margins. Its values are those of the original
            model output, up to rounding.
        n_classes: The size of the vocabulary. None before the first call of the model.
        is_deferred: Whether the last call computed logits for a few tokens at a time.
    """

    def __init__(self, model: nn.Module, output: ModelOutput) -> None:
        super().__init__()
        self.model = model
        self.n_classes: int | None = None
        self.is_deferred = False
        self._can_defer = True
        self._read, self._ahead = output.read, int(output.predicts_next)
        self.output = of_margins(output, lambda: self.n_classes)
        self._n_rows = vocabulary_size(model)

    def forward(self, *args: Tensor, labels: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the margin of each label, and 1 if the label is the most likely token, else 0."""
        logits = self._logits(args, kwargs, labels)
        labels = labels[:, self._ahead :]
        classes = torch.where(labels == IGNORED, 0, labels)
        self.n_classes = logits.shape[-1]
        self.is_deferred = isinstance(logits, DeferredLogits)
        if isinstance(logits, DeferredLogits):
            margins, is_right = margins_of_tokens(logits.hidden, classes, logits.head)
        else:
            margins, is_right = margin(logits, classes), logits.argmax(-1) == classes
        return torch.stack([margins, is_right.to(margins.dtype)], dim=-1)

    def _logits(self, args: Any, kwargs: Any, labels: Tensor) -> Tensor:
        """Return a placeholder for the model's logits, or the logits if the model reads them."""
        if self._can_defer:
            try:
                with _Defers(self._n_rows):
                    returned = self.model(*args, **kwargs)
                return self._of_labels(returned, labels)
            except _LogitsNeededError:
                self._can_defer = False
        return self._of_labels(self.model(*args, **kwargs), labels)

    def _of_labels(self, returned: Any, labels: Tensor) -> Tensor:
        logits = self._read(without_virtual_tokens(self.model, returned, labels))
        return logits[:, : logits.shape[1] - self._ahead]

    def notice(self, n_tokens: int) -> str:
        """Return a notice that says how logits were computed in the last call of the model."""
        way = "together, because the model does not end in a linear layer and entrywise functions"
        if self.is_deferred:
            way = "a few tokens at a time, and again in the backward pass, which needs less memory"
        logits = f"{n_tokens} tokens have {n_tokens} x {self.n_classes} logits"
        return f"{logits}. They are computed {way}."


def vocabulary_size(model: nn.Module) -> int:
    """Return the vocabulary size: the number of rows of the model's largest embedding.

    For a model without embeddings, return the largest number of rows of a matrix.
    """
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    matrices = tables or [p for p in model.parameters() if p.ndim == 2]
    return max(map(len, matrices), default=0)
