"""What is computed for each sample, whichever way it is differentiated."""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.model_outputs.model_output import ModelOutput


def as_blocks(gradients: Iterable[Tensor]) -> list[Tensor]:
    """Return (batch, *shape) tensors as (batch, entries) blocks of one dtype, float32 at most."""
    blocks = [block.reshape(len(block), -1) for block in gradients]
    if len({block.dtype for block in blocks}) > 1 or blocks[0].dtype is torch.float64:
        blocks = [block.float() for block in blocks]
    return blocks


@dataclass(frozen=True, slots=True)
class PerSample:
    """What one batch gives under one checkpoint, with its gradients as a whole.

    Attributes:
        gradients: df/dtheta, one (batch, *shape) tensor a parameter, in order.
        outputs: f, shape (batch,).
        predictions: Shape (batch,).
        loss_weights: Q, shape (batch,).
        curvature: W, shape (batch,); None where the output has none.
    """

    gradients: dict[str, Tensor]
    outputs: Tensor
    predictions: Tensor
    loss_weights: Tensor
    curvature: Tensor | None

    def columns(self) -> list[Tensor]:
        """Return outputs, predictions, loss weights and, if there is one, curvature."""
        columns = [self.outputs, self.predictions, self.loss_weights]
        return columns if self.curvature is None else [*columns, self.curvature]

    def blocks(self) -> list[Tensor]:
        """Return the gradients where they are, one (batch, entries) block a parameter."""
        return as_blocks(self.gradients.values())


def beside_gradient(output: ModelOutput, outputs: Tensor, label: Tensor) -> tuple[Tensor, ...]:
    """Return prediction, loss weight and, if there is one, curvature of one sample."""
    functions = [output.prediction, output.loss_weight]
    if output.curvature is not None:
        functions.append(output.curvature)
    return tuple(function(outputs.detach(), label) for function in functions)


def beside_gradients(output: ModelOutput, outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Return ``beside_gradient`` of all samples, shape (batch,) each."""
    with torch.no_grad():
        beside = torch.vmap(lambda x, label: beside_gradient(output, x, label))
        return beside(outputs.detach(), labels)


def per_sample(gradients: dict[str, Tensor], columns: Sequence[Tensor]) -> PerSample:
    """Put together gradients with f and what ``beside_gradient`` gives, in that order."""
    outputs, predictions, loss_weights, *curvature = columns
    return PerSample(
        gradients, outputs, predictions, loss_weights, curvature[0] if curvature else None
    )


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Generator[None, None, None]:
    """Run with the model in evaluation mode.

    Dropout is off and BatchNorm uses its stored statistics, whatever mode the model was in; that
    mode is restored. The inference kernels that torch's transformer layers take when only other
    layers are differentiated are off: they leave no graph to read.
    """
    training = [module for module in model.modules() if module.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module in training:
            module.training = True


@contextlib.contextmanager
def graph_to(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
    """Run with a graph to these parameters alone.

    Others are left out while it runs: what only they need would be kept for nothing.
    """
    chosen = {id(parameter) for parameter in parameters}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def differentiating(
    model: nn.Module, parameters: Iterable[nn.Parameter]
) -> Generator[None, None, None]:
    """Run in evaluation mode, with a graph to these parameters alone."""
    with in_evaluation_mode(model), graph_to(model, parameters):
        yield


def check_graph(values: Tensor) -> None:
    """Refuse a model output that no parameter leads to.

    Raises:
        InputError: If it has no graph.
    """
    if not values.requires_grad:
        raise InputError(
            "The model output must depend on a parameter that is differentiated. Found none that "
            "leads to it: don't call the model under `torch.no_grad()` or `inference_mode()`, "
            "don't `detach()` on the way, and choose `parameters` that play a part.",
            code="gradients.no_graph",
        )
