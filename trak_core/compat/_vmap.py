"""Per-sample gradients by torch.func, of a function of one sample that a user has written."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from trak_core.compat._branches import Branches, SamplesDisagree
from trak_core.gradients import (
    Batch,
    PerSample,
    Samples,
    as_batch,
    beside_gradient,
    in_evaluation_mode,
    per_sample,
)
from trak_core.model_outputs.model_output import ModelOutput

_Tensors = tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor]


def per_sample_gradients(
    model: nn.Module, parameters: dict[str, nn.Parameter], output: ModelOutput, samples: Samples
) -> PerSample:
    """Differentiate f of each sample of a batch with respect to ``parameters`` alone.

    The numbers of a sample don't depend on the other samples of its batch, to rounding. Where the
    model's code branches on a sample's values, samples that take the same branch go together.

    Args:
        model: On the batch's device. Used in evaluation mode, and left as it was.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: The batch, see ``as_batch``; first dimension = sample.

    Returns:
        Gradients, outputs and what goes with them of the batch, on its device.

    Raises:
        RuntimeError: If vmap cannot take the model; ``gradients_one_by_one`` can.

    Source: Park et al., "TRAK", ICML 2023, section 3.2 (the features before projection).
    """
    trained = {name: p.detach() for name, p in parameters.items()}
    fixed = {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name not in trained
    }

    def value(trained: dict[str, Tensor], sample: _Tensors) -> tuple[Tensor, tuple[Tensor, ...]]:
        args, kwargs, label = sample
        # Copies: a model may write into its inputs, and they may be needed once more.
        args = tuple(tensor.unsqueeze(0).clone() for tensor in args)
        kwargs = {name: tensor.unsqueeze(0).clone() for name, tensor in kwargs.items()}
        returned = functional_call(model, (trained, fixed), args, kwargs)
        outputs = output.read(returned).squeeze(0)
        f = output.value(outputs, label)
        return f, (f.detach(), *beside_gradient(output, outputs, label))

    def together(batch: Batch) -> PerSample:
        tensors = batch.args, batch.kwargs, batch.labels
        try:
            with Branches():
                gradients, columns = vmap(grad(value, has_aux=True), (None, 0))(trained, tensors)
            return per_sample(gradients, columns)
        except SamplesDisagree as disagreement:
            answers = disagreement.answers
        rows = [answers.nonzero().flatten(), (~answers).nonzero().flatten()]
        return _joined(rows, [together(batch.rows(part)) for part in rows])

    # Fused attention has no vmap rule; the plain formula gives the same function.
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with in_evaluation_mode(model), plain:
        return together(as_batch(samples, output))


def _in_place(rows: list[Tensor], parts: list[Tensor]) -> Tensor:
    """Return the rows of several parts in their places."""
    whole = parts[0].new_empty((sum(map(len, rows)), *parts[0].shape[1:]))
    for which, part in zip(rows, parts, strict=True):
        whole[which] = part
    return whole


def _joined(rows: list[Tensor], parts: list[PerSample]) -> PerSample:
    """Put the samples of two parts back into their places, a parameter at a time."""
    # Taken out as it is copied, so that no more than one parameter is there twice.
    names = list(parts[0].gradients)
    gradients = {name: _in_place(rows, [p.gradients.pop(name) for p in parts]) for name in names}
    columns = zip(*(part.columns() for part in parts), strict=True)
    return per_sample(gradients, [_in_place(rows, list(column)) for column in columns])
