"""TRAK's two ways to per-sample gradients: by torch.func all at once, or by autograd one by one.

Both differentiate the chosen parameters only, in the order of ``named_parameters``, and give equal
numbers.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.compat._vectors import vectorize
from trak_core.compat._vmap import per_sample_gradients
from trak_core.compat.modelout_functions import (
    AbstractModelOutput,
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    PerSample,
    as_batch,
    check_finite,
    check_labels,
    count_classes,
    explain_not_finite,
    formed_gradients,
    gradients_at_once,
    gradients_one_by_one,
    why_not_at_once,
)
from trak_core.model.features import Features
from trak_core.model_outputs.classification import CLASSIFICATION
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.projection import NotFiniteError
from trak_core.spec import ProjectionSpec


def chosen_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, in the model's order.

    Raises:
        InputError: If a name is not one of the model's parameters.
    """
    parameters = dict(model.named_parameters())
    if grad_wrt is None:
        return parameters
    names = set(grad_wrt)
    unknown = sorted(names - parameters.keys())
    if unknown or not names:
        raise InputError(
            "`grad_wrt` must name parameters of the model, at least one. Found "
            f"{', '.join(unknown) or 'none'}; the model has {', '.join(parameters)}."
        )
    return {name: value for name, value in parameters.items() if name in names}


# Model, parameters, model output and samples.
OfClassification = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]

# Tasks whose f is exactly ``CLASSIFICATION``: not their subclasses, which may say something else.
ONE_PASS = {ImageClassificationModelOutput, TextClassificationModelOutput}

# What ``_Value`` returns is f itself; nothing else is asked for here.
_VALUE = ModelOutput(
    read=lambda returned: cast(Tensor, returned),
    value=lambda outputs, label: outputs,
    loss_weight=lambda outputs, label: torch.zeros_like(outputs),
    curvature=None,
    prediction=lambda outputs, label: torch.zeros_like(outputs),
    label_number=lambda label: label,
    label_ndim=None,
    n_classes=lambda outputs: None,
)


class _Value(nn.Module):
    """A task's f as what a module returns for a batch of one, so that it can be differentiated."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, functional: bool) -> None:
        super().__init__()
        self.model = model
        # Not as a submodule: a task that is one has no part in the gradient.
        self._task, self._functional = (task,), functional

    def forward(self, *batch: Tensor) -> Tensor:
        (task,) = self._task
        weights = buffers = None
        if self._functional:
            weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        one_by_one = self._functional or getattr(task, "per_sample", False)
        sample = [t.squeeze(0) for t in batch] if one_by_one else batch
        f = task.get_output(self.model, weights, buffers, *sample)
        if f.numel() != 1:
            raise InputError(
                "A task's get_output must return one number a sample. Found a tensor of shape "
                f"{tuple(f.shape)} for one sample."
            )
        return f.reshape(1)


def check_gradients(
    gradients: Tensor | Mapping[str, Tensor], shapes: Mapping[str, torch.Size], rows: np.ndarray
) -> None:
    """Stop at gradients that are NaN or infinite.

    Args:
        gradients: Names to (B, *shape), or shape (B, p).
        shapes: Of the parameters that are differentiated, in order.
        rows: Positions of the samples, for the message.

    Raises:
        InputError: Naming the samples and the parameters.
    """
    if isinstance(gradients, Tensor):
        sizes = [size.numel() for size in shapes.values()]
        gradients = dict(zip(shapes, gradients.split(sizes, dim=1), strict=True))
    nothing = torch.zeros(len(rows), device=next(iter(gradients.values())).device)
    check_finite(PerSample(dict(gradients), nothing, nothing, nothing, None), rows.tolist())


class AbstractGradientComputer(ABC):
    """Per-sample gradients of a task's model output, and its loss weights."""

    @abstractmethod
    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cuda",
    ) -> None:
        """Keep the arguments; ``dtype`` is that of stored features, gradients keep their own."""
        self.model = model
        self.modelout_fn = task
        self.grad_dim = grad_dim
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Take the parameters that the model has now."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        """Return df/dtheta of each sample: names to (B, *shape), or shape (B, grad_dim)."""

    @abstractmethod
    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return Q of each sample, shape (B, 1)."""


class _OfChosenParameters(AbstractGradientComputer):
    """What both ways share: which parameters are differentiated."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cuda",
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        """Take the names of the parameters to differentiate; all of them if None."""
        super().__init__(model, task, grad_dim, dtype, device)
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        self.logger = logging.getLogger("GradientComputer")
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        """Take the parameters that the model has now."""
        self.model = model
        self._chosen = chosen_parameters(model, self.grad_wrt)


class FunctionalGradientComputer(_OfChosenParameters):
    """Gradients of f as a function of the weights; the result is names to tensors (B, *shape).

    By one backward pass for all samples where f is a classification's of this module, and by
    ``vmap(grad(f))`` for a task of the user's own, or a model that one pass cannot take.
    """

    # Not known yet; what a model does with samples is the same under all checkpoints.
    _takes_one_pass: bool | None = None
    _n_classes: int | None = None

    def load_model_params(self, model: nn.Module) -> None:
        """Set ``func_weights`` and ``func_buffers``, names to tensors."""
        super().load_model_params(model)
        self.func_weights = dict(model.named_parameters())
        self.func_buffers = dict(model.named_buffers())

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return names of the chosen parameters to gradients (B, *shape)."""
        what = self._for_one_pass(batch)
        if what is not None:
            return formed_gradients(gradients_at_once, *what).gradients
        value = _Value(self.model, self.modelout_fn, functional=True)
        parameters = {f"model.{name}": p for name, p in self._chosen.items()}
        found = per_sample_gradients(value, parameters, _VALUE, tuple(batch)).gradients
        return {name.removeprefix("model."): gradient for name, gradient in found.items()}

    def _for_one_pass(self, batch: Sequence[Tensor]) -> OfClassification | None:
        """Return what one pass differentiates, None if it can't."""
        if type(self.modelout_fn) not in ONE_PASS:
            return None
        samples = cast(ClassificationModelOutput, self.modelout_fn).as_samples(batch)
        what = self.model, self._chosen, CLASSIFICATION, as_batch(samples, CLASSIFICATION)
        if self._takes_one_pass is None and len(batch[0]) > 1:
            self._takes_one_pass = why_not_at_once(*what) is None
        return what if self._takes_one_pass else None

    @property
    def is_as_it_came(self) -> bool:
        """Whether nothing is a subclass's, or a method that was replaced, here or in the task."""
        replaced = {"compute_per_sample_grad", "compute_loss_grad"} & set(vars(self))
        task = type(self.modelout_fn)
        of_task = {name for name in vars(self.modelout_fn) if callable(getattr(task, name, None))}
        return type(self) is FunctionalGradientComputer and not replaced and not of_task

    def project_at_once(
        self, batch: Sequence[Tensor], projection: ProjectionSpec, rows: np.ndarray
    ) -> list[Tensor] | None:
        """Project without whole gradients, and return what else the same pass knows of samples.

        Args:
            batch: Inputs and, last, labels.
            projection: Of the gradients.
            rows: Positions of the samples, for messages.

        Returns:
            Projected gradients, shape (B, k), unscaled; Q, shape (B, 1); and ``SAMPLE_COLUMNS``,
            shape (B, 4), float64. None where samples need other ways than one pass, or where Q is
            that of a temperature.

        Raises:
            InputError: If a label is not one of the model's, or if gradients are not finite.
        """
        what = self._for_one_pass(batch)
        if what is None or cast(ClassificationModelOutput, self.modelout_fn).loss_temperature != 1:
            return None
        *_, samples = what
        labels, device = samples.labels, samples.labels.device
        if self._n_classes is None:
            self._n_classes = count_classes(self.model, CLASSIFICATION, samples, device)
        check_labels(labels, CLASSIFICATION, self._n_classes, range(len(labels)))
        sums = Features.zeros(self._chosen, [projection], len(labels), torch.get_num_threads())
        try:
            f, predictions, loss_weights, curvature = gradients_at_once(*what, sums)
        except NotFiniteError:
            explain_not_finite(*what, rows.tolist())
            raise
        if not sums.rows[0].isfinite().all():
            explain_not_finite(*what, rows.tolist())
        columns = [column.double() for column in (f, labels, predictions, curvature)]
        return [sums.rows[0], loss_weights[:, None], torch.stack(columns, dim=1)]

    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return Q of each sample, shape (B, 1)."""
        return self.modelout_fn.get_out_to_loss_grad(
            self.model, self.func_weights, self.func_buffers, batch
        )


class IterativeGradientComputer(_OfChosenParameters):
    """Gradients by autograd in a loop, for what ``vmap`` cannot take; shape (B, grad_dim).

    The task's ``get_output`` is called with weights and buffers None, once a sample: with a batch
    of one, or, for the tasks here that take one sample, with the sample.
    """

    def load_model_params(self, model: nn.Module) -> None:
        """Set ``model_params``, the parameters to differentiate."""
        super().load_model_params(model)
        self.model_params = list(self._chosen.values())

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the gradients side by side, shape (B, grad_dim)."""
        value = _Value(self.model, self.modelout_fn, functional=False)
        what = gradients_one_by_one, value, self._chosen, _VALUE, tuple(batch)
        return vectorize(formed_gradients(*what).gradients, device=self.model_params[0].device)

    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return Q of each sample, shape (B, 1)."""
        return self.modelout_fn.get_out_to_loss_grad(self.model, None, None, batch)
