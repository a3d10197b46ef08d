"""The two classes of ``trak`` that compute per-sample gradients, with the methods of trak_core."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trak_core.attribution.project_gradients import queued_features
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
from trak_core.settings import ProjectionSpec

# The arguments of every function that computes gradients: model, parameters, model output, batch.
_Arguments = tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]


def chosen_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters with the names ``grad_wrt``, frozen or not. None selects all."""
    names = dict(model.named_parameters()) if grad_wrt is None else grad_wrt
    return select_parameters(model, list(names))


class _ModelWithTask(nn.Module):
    """A module that returns a task's model output for each sample of a batch, shape (B,)."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, functional: bool) -> None:
        super().__init__()
        self.model = model
        # A task may be a module. torch does not register it as a submodule if it is in a tuple.
        self._task, self._functional = (task,), functional

    def forward(self, *batch: Tensor) -> Tensor:
        (task,), state = self._task, (None, None)
        if self._functional:
            state = dict(self.model.named_parameters()), dict(self.model.named_buffers())

        def f(*sample: Tensor) -> Tensor:
            return task.get_output(self.model, *state, *sample)

        if len(batch[0]) > 1:
            # vmap does not support fused attention. The math backend computes the same function.
            with sdpa_kernel(SDPBackend.MATH):
                return torch.vmap(f)(*batch)
        if self._functional or getattr(task, "per_sample", False):
            batch = tuple(t.squeeze(0) for t in batch)
        return f(*batch).reshape(1)


_VALUE = ModelOutput(value=lambda f, _: f, has_labels=False)


class AbstractGradientComputer(ABC):
    """The base class of objects that compute a task's per-sample gradients and loss weights."""

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
        """Use the current parameters of ``model`` in the next calls."""

    @abstractmethod
    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        """Return the gradients of the model outputs of the B samples in a batch.

        They are a dict with a tensor (B, *shape) for each parameter, or one tensor (B, grad_dim).
        """

    @abstractmethod
    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the loss weight Q of each sample, shape (B, 1)."""


class FunctionalGradientComputer(AbstractGradientComputer):
    """Compute the gradients of all B samples of a batch in one backward pass.

    The gradients are a dict with a tensor (B, *shape) for each parameter. ``torch.vmap`` is called
    only for the ``get_output`` of a user-defined task. If the model or the task does not support
    one backward pass, gradients are computed for one sample at a time, and a notice is printed.
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
        # The first batch with more than one sample determines the method for all checkpoints.
        self._method = None if self._functional else gradients_one_by_one
        self.load_model_params(model)

    def load_model_params(self, model: nn.Module) -> None:
        self.model, self.parameters = model, chosen_parameters(model, self.grad_wrt)
        self.model_params = list(self.parameters.values())
        # The weights and buffers that are passed when a task calls the model, or None.
        self.func_weights = dict(model.named_parameters()) if self._functional else None
        self.func_buffers = dict(model.named_buffers()) if self._functional else None

    def _method_and_arguments(self, batch: Sequence[Tensor]) -> tuple[GradientMethod, _Arguments]:
        samples = classification_batch(self.modelout_fn, batch)
        arguments: _Arguments
        if samples is not None:
            arguments = self.model, self.parameters, CLASSIFICATION, samples
        else:
            if self._functional:
                refuse_hooks(self.model, self.parameters)
            model = _ModelWithTask(self.model, self.modelout_fn, self._functional)
            arguments = model, self.parameters, _VALUE, as_batch(tuple(batch), _VALUE)
        if self._method is None and len(batch[0]) > 1:
            self._method = gradient_method(*arguments)
        return self._method or gradients_one_by_one, arguments

    def _formed(self, batch: Sequence[Tensor]) -> PerSample:
        method, arguments = self._method_and_arguments(batch)
        return formed_gradients(method, *arguments)

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        return self._formed(batch).gradients

    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        model = self.model, self.func_weights, self.func_buffers
        return self.modelout_fn.get_out_to_loss_grad(*model, batch)

    def features(
        self, batch: Sequence[Tensor], projection: ProjectionSpec, ids: Sequence[object]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a batch's projected gradients, shape (B, k), and loss weights, shape (B, 1).

        If the loss weights would need another forward pass, return None instead of them.
        """
        method, arguments = self._method_and_arguments(batch)
        threads = torch.get_num_threads()
        rows, *columns = queued_features(
            method, *arguments, projection, ids, threads, None, is_scaled=False
        ).wait()
        # CLASSIFICATION has no temperature, so its loss weights are right only for temperature 1.
        is_classification = arguments[2] is CLASSIFICATION
        if is_classification and vars(self.modelout_fn)["loss_temperature"] == 1:
            return rows, columns[3].unsqueeze(1)
        return rows, None


class IterativeGradientComputer(FunctionalGradientComputer):
    """Compute the gradients of the B samples of a batch in a loop, as one tensor (B, grad_dim).

    The task's ``get_output`` is called with one sample, which has a batch dimension only if
    ``task.per_sample`` is false. The arguments ``weights`` and ``buffers`` are None.
    """

    _functional = False

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor:
        return torch.cat(self._formed(batch).blocks(), dim=1)
