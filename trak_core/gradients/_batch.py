"""A batch as the model takes it: positional and named inputs, and the labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.model_outputs.model_output import IGNORED, ModelOutput


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and labels of some samples; the first dimension of every tensor is the sample.

    Attributes:
        args: The model's positional arguments.
        kwargs: Its named arguments.
        labels: Shape (batch, ...); ones where the model output needs no label.
        lengths: Tokens of each text, shape (batch,), where shorter ones are padded on the right;
            else None.
        along: Names of the inputs (see ``tensors``) that are padded with the labels: those with a
            row a token, in the second dimension.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    labels: Tensor
    lengths: Tensor | None = None
    along: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with a function applied to every tensor, which keeps lengths true."""
        kwargs = {name: function(tensor) for name, tensor in self.kwargs.items()}
        lengths = None if self.lengths is None else function(self.lengths)
        args = tuple(map(function, self.args))
        return Batch(args, kwargs, function(self.labels), lengths, self.along)

    def rows(self, which: slice | Tensor) -> "Batch":
        """Return some of the samples, padded no further than the longest of them."""
        chosen = self.mapped(lambda tensor: tensor[which])
        if chosen.lengths is None or not len(chosen):
            return chosen
        return chosen.cut(int(chosen.lengths.max()))

    def cut(self, length: int) -> "Batch":
        """Return texts that have ``lengths`` without the tokens from ``length`` on."""
        assert self.lengths is not None
        inputs = {
            name: tensor[:, :length] if name in self.along else tensor
            for name, tensor in self.tensors()
        }
        lengths = self.lengths.clamp(max=length)
        return self.with_inputs(inputs, self.labels[:, :length], lengths)

    def with_inputs(
        self, inputs: Mapping[str, Tensor], labels: Tensor, lengths: Tensor | None
    ) -> "Batch":
        """Return a batch whose inputs are told apart in the same way; see ``tensors``."""
        tensors = list(inputs.values())
        n_args = len(self.args)
        kwargs = dict(zip(self.kwargs, tensors[n_args:], strict=True))
        return Batch(tuple(tensors[:n_args]), kwargs, labels, lengths, self.along)

    def given_to(self, model: nn.Module) -> object:
        """Return what the model returns; it gets copies, for it may write into its inputs."""
        kwargs = {name: tensor.clone() for name, tensor in self.kwargs.items()}
        return model(*(tensor.clone() for tensor in self.args), **kwargs)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the inputs with their names, for messages."""
        yield from ((f"argument {i}", tensor) for i, tensor in enumerate(self.args))
        yield from self.kwargs.items()


# A tuple of positional arguments, the labels last; named arguments and `labels`; or told apart.
Samples = Sequence[Tensor] | Mapping[str, Tensor] | Batch


def as_batch(samples: Samples, output: ModelOutput) -> Batch:
    """Tell inputs and labels apart.

    Tokens that a named input ``attention_mask`` leaves out get the label ``IGNORED``: padding is
    never predicted.

    Args:
        samples: A tuple of the model's positional arguments and, last, the labels; or a dict of
            its named arguments and ``labels``. Without labels if ``output.label_ndim`` is None. Or
            a batch, returned as it is.
        output: The model output.

    Returns:
        The batch, on the samples' device.

    Raises:
        InputError: If there are no labels, no inputs, or tensors of different lengths.
    """
    if isinstance(samples, Batch):
        return samples
    labelled = output.label_ndim is not None
    args, kwargs, labels = (), {}, None
    if isinstance(samples, Mapping):
        kwargs = {
            name: tensor for name, tensor in samples.items() if not labelled or name != "labels"
        }
        labels = samples.get("labels") if labelled else None
        found = f"a dict with {', '.join(map(str, samples))}"
    else:
        args = tuple(samples[:-1]) if labelled else tuple(samples)
        labels = samples[-1] if labelled and samples else None
        found = f"a tuple of {len(samples)}"
    if not (args or kwargs) or (labelled and labels is None):
        if not labelled:
            needed = "a tuple of the model's positional arguments, or a dict of its named ones"
        else:
            needed = (
                "a tuple of the model's positional arguments and, last, the label, or a dict of "
                "its named arguments and `labels`"
            )
        raise InputError(f"A sample must be {needed}. Found {found}.", code="gradients.sample_form")
    if labels is None:
        first = next(iter((*args, *kwargs.values())))
        labels = torch.ones(len(first), dtype=torch.int64, device=first.device)
    mask = kwargs.get("attention_mask")
    if output.label_ndim == 1 and mask is not None and mask.shape == labels.shape:
        labels = torch.where(mask.bool(), labels, IGNORED)
    batch = Batch(args, kwargs, labels)
    for name, tensor in batch.tensors():
        if tensor.ndim == 0 or len(tensor) != len(batch):
            raise InputError(
                f"Every tensor of a batch must have one row a sample. Found {len(batch)} labels "
                f"and {name} of shape {tuple(tensor.shape)}.",
                code="gradients.batch_rows",
            )
    return batch
