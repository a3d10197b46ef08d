"""TRAK's two ways to per-sample gradients: of all samples at once, or one by one.

Both differentiate the chosen parameters, in the order of ``named_parameters``, by the methods of
``trak_core.gradients``, and give equal numbers to rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trak_core.attribution.project_gradients import batch_features
from trak_core.compat.modelout_functions import AbstractModelOutput, classification_batch
from trak_core.gradients import (
    Batch,
    GradientMethod,
    PerSample,
    as_batch,
    formed_gradients,
    gradient_method,
    gradients_one_by_one,
    refuse_hooks,
    select_parameters,
)
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.spec import ProjectionSpec

_Given = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]


def chosen_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, frozen or not, in the model's order."""
    names = dict(model.named_parameters()) if grad_wrt is None else grad_wrt
    return select_parameters(model, list(names))


class _Value(nn.Module):
    """A module that returns f of each sample, by a task's ``get_output``."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, functional: bool) -> None:
        super().__init__()
        self.model = model
        # In a tuple, because a task that is a module has no part in the gradient.
        self._task, self._functional = (task,), functional

    def forward(self, *batch: Tensor) -> Tensor:
        (task,), state = self._task, (None, None)
        if self._functional:
            state = dict(self.model.named_parameters()), dict(self.model.named_buffers())

        def f(*sample: Tensor) -> Tensor:
            return task.get_output(self.model, *state, *sample)

        if len(batch[0]) > 1:
            # Fused attention has no vmap rule; the plain formula gives the same function.
            with sdpa_kernel(SDPBackend.MATH):
                return torch.vmap(f)(*batch)
        takes_sample = self._functional or getattr(task, "per_sample", False)
        return f(*(t.squeeze(0) for t in batch) if takes_sample else batch).reshape(1)


_VALUE = ModelOutput(value=lambda f, _: f, has_labels=False)


class AbstractGradientComputer(ABC):
    """Per-sample gradients of a task's model output, and its loss weights."""

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cuda",
    ) -> None:
        self.model, self.modelout_fn, self.grad_dim = model, task, grad_dim
        self.dtype, self.device = dtype, device

    @abstractmethod
    def load_model_params(self, model: nn.Module) -> None:
        """Take the parameters that the model has now."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        """Return df/dtheta of each sample: names to (B, *shape), or shape (B, grad_dim)."""

    @abstractmethod
    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return Q of each sample, shape (B, 1)."""


class FunctionalGradientComputer(AbstractGradientComputer):
    """Gradients of f as a function of the weights: names to tensors (B, *shape).

    One backward pass differentiates all samples, of a task of the user's own by ``torch.vmap`` over
    its ``get_output``. Where one pass cannot take a model or task, samples come one by one, which a
    notice on standard output says.
    """

    _functional: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        task: AbstractModelOutput,
        grad_dim: int | None = None,
        dtype: torch.dtype = torch.float16,
        device: str | torch.device = "cuda",
        grad_wrt: Iterable[str] | None = None,
    ) -> None:
        super().__init__(model, task, grad_dim, dtype, device)
        self.grad_wrt = None if grad_wrt is None else list(grad_wrt)
        # None until a batch of several samples shows it; all checkpoints of a model agree.
        self._method = None if self._functional else gradients_one_by_one
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        self.model, self.parameters = model, chosen_parameters(model, self.grad_wrt)
        self.model_params = list(self.parameters.values())
        # Arguments of functional calls; None where a task calls the model itself.
        self.func_weights = dict(model.named_parameters()) if self._functional else None
        self.func_buffers = dict(model.named_buffers()) if self._functional else None

    def _given(self, batch: Sequence[Tensor]) -> tuple[GradientMethod, _Given]:
        """Return a method of ``trak_core.gradients``, and what it takes before a consumer."""
        samples = classification_batch(self.modelout_fn, batch)
        given: _Given
        if samples is not None:
            given = self.model, self.parameters, CLASSIFICATION, samples
        else:
            if self._functional:
                refuse_hooks(self.model, self.parameters, "torch.vmap", "Go one by one")
            value = _Value(self.model, self.modelout_fn, self._functional)
            given = value, self.parameters, _VALUE, as_batch(tuple(batch), _VALUE)
        if self._method is None and len(batch[0]) > 1:
            self._method = gradient_method(*given)
        return self._method or gradients_one_by_one, given

    def _formed(self, batch: Sequence[Tensor]) -> PerSample:
        method, given = self._given(batch)
        return formed_gradients(method, *given)

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        return self._formed(batch).gradients

    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        model = self.model, self.func_weights, self.func_buffers
        return self.modelout_fn.get_out_to_loss_grad(*model, batch)

    def features(
        self, batch: Sequence[Tensor], projection: ProjectionSpec, ids: Sequence[object]
    ) -> tuple[np.ndarray, Tensor | None]:
        """Return projected gradients (B, k), and Q, (B, 1), if it is known already.

        No gradients are formed as a whole. Messages name samples by ``ids``.
        """
        (method, given), threads = self._given(batch), torch.get_num_threads()
        settings = projection, ids, threads, None
        rows, columns = batch_features(method, *given, *settings, is_scaled=False)
        is_plain = given[2] is CLASSIFICATION and vars(self.modelout_fn)["loss_temperature"] == 1
        return rows, columns[3].unsqueeze(1) if is_plain else None


class IterativeGradientComputer(FunctionalGradientComputer):
    """Gradients by autograd in a loop over samples, shape (B, grad_dim).

    The task's ``get_output`` is called once a sample, with weights and buffers None. It gets a
    batch of one, or the sample itself where the task has ``per_sample = True``.
    """

    _functional = False

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor:
        return torch.cat(self._formed(batch).blocks(), dim=1)
