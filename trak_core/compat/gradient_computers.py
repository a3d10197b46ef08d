"""Compute per-sample gradients in TRAK's two ways: all at once, or by autograd one by one.

Both differentiate the chosen parameters only, in the order of ``named_parameters``, and give equal
numbers to rounding.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from trak_core.attribution.project_gradients import Features
from trak_core.compat.modelout_functions import (
    AbstractModelOutput,
    ClassificationModelOutput,
    ImageClassificationModelOutput,
    TextClassificationModelOutput,
)
from trak_core.compat.projectors import vectorize
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    GradientMethod,
    PerSample,
    as_batch,
    check_finite,
    choose_method,
    explain_not_finite,
    formed_gradients,
    gradients_at_once,
    gradients_one_by_one,
    in_evaluation_mode,
    refuse_hooks,
)
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.projection import NotFiniteError
from trak_core.spec import ProjectionSpec


def chosen_parameters(model: nn.Module, grad_wrt: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, in the model's order."""
    parameters = dict(model.named_parameters())
    if grad_wrt is None:
        return parameters
    names = set(grad_wrt)
    unknown = sorted(names - parameters.keys())
    if unknown or not names:
        raise InputError(
            "`grad_wrt` must name parameters of the model, at least one. Found "
            f"{', '.join(unknown) or 'none'}; the model has {', '.join(parameters)}.",
            code="compat.grad_wrt",
        )
    return {name: value for name, value in parameters.items() if name in names}


# A method, and its model, parameters, model output and samples.
_Differentiated = tuple[
    GradientMethod, tuple[nn.Module, dict[str, nn.Parameter], ModelOutput, Batch]
]
# Tasks whose f is exactly ``CLASSIFICATION``; their subclasses may compute something else.
_ONE_PASS = {ImageClassificationModelOutput, TextClassificationModelOutput}

# ``_Value`` returns f itself, and the other columns are not needed here.
_VALUE = ModelOutput(
    read=lambda returned: cast(Tensor, returned),
    value=lambda outputs, label: outputs,
    loss_weight=lambda outputs, label: torch.zeros_like(outputs),
    prediction=lambda outputs, label: torch.zeros_like(outputs),
    has_labels=False,
)


class _Value(nn.Module):
    """A module that returns a task's f for a batch of one, so that it can be differentiated."""

    def __init__(self, model: nn.Module, task: AbstractModelOutput, functional: bool) -> None:
        super().__init__()
        self.model = model
        # In a tuple, because a task that is a module has no part in the gradient.
        self._task, self._functional = (task,), functional

    def forward(self, *batch: Tensor) -> Tensor:
        (task,) = self._task
        weights = buffers = None
        if self._functional:
            weights, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        one_by_one = self._functional or getattr(task, "per_sample", False)
        sample = [t.squeeze(0) for t in batch] if one_by_one else batch
        return task.get_output(self.model, weights, buffers, *sample).reshape(1)


def _gradients_by_vmap(
    value: _Value, parameters: Mapping[str, nn.Parameter], batch: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return names of the model's ``parameters`` to df/dtheta of each sample, (B, *shape)."""
    chosen = {f"model.{name}": p.detach() for name, p in parameters.items()}
    state = *value.named_parameters(), *value.named_buffers()
    fixed = {name: tensor.detach() for name, tensor in state if name not in chosen}

    def f(chosen: dict[str, Tensor], *sample: Tensor) -> Tensor:
        # Copies, because a model may write into its inputs.
        batch = tuple(tensor.unsqueeze(0).clone() for tensor in sample)
        return functional_call(value, (chosen, fixed), batch).squeeze(0)

    # Fused attention has no vmap rule; the plain formula gives the same function.
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with in_evaluation_mode(value), plain:
        gradients = vmap(grad(f), (None, *(0 for _ in batch)))(chosen, *batch)
    return {name.removeprefix("model."): gradient for name, gradient in gradients.items()}


def check_gradients(
    gradients: Tensor | Mapping[str, Tensor], shapes: Mapping[str, torch.Size], rows: np.ndarray
) -> None:
    """Refuse gradients that are NaN or infinite; the error names samples and parameters.

    Gradients are names to (B, *shape), or one tensor (B, p), of the parameters in ``shapes`` if it
    has their size.
    """
    if isinstance(gradients, Tensor):
        sizes = [size.numel() for size in shapes.values()]
        is_whole = gradients.shape[1:] == (sum(sizes),)
        parts = gradients.split(sizes, dim=1) if is_whole else [gradients]
        gradients = dict(zip(shapes if is_whole else ["gradients"], parts, strict=True))
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
        """Keep the arguments; gradients keep their own dtype, ``dtype`` is that of the store."""
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
    """A gradient computer that differentiates the chosen parameters only."""

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

    # Arguments of functional calls; None where a task calls the model itself.
    func_weights: dict[str, nn.Parameter] | None = None
    func_buffers: dict[str, Tensor] | None = None

    def load_model_params(self, model: nn.Module) -> None:
        self.model = model
        self._chosen = chosen_parameters(model, self.grad_wrt)

    def compute_loss_grad(self, batch: Sequence[Tensor]) -> Tensor:
        model = self.model, self.func_weights, self.func_buffers
        return self.modelout_fn.get_out_to_loss_grad(*model, batch)


class FunctionalGradientComputer(_OfChosenParameters):
    """Gradients of f as a function of the weights: names to tensors (B, *shape).

    One backward pass differentiates all samples of the image and text classifications. A task of
    the user's own, and a model that one pass cannot take, go through ``vmap(grad(f))``. Take
    ``IterativeGradientComputer`` where ``vmap`` cannot run a model or task.
    """

    # None until a batch of several samples shows it; all checkpoints of a model agree.
    _method: GradientMethod | None = None

    def load_model_params(self, model: nn.Module) -> None:
        """Set ``func_weights`` and ``func_buffers``, names to tensors."""
        super().load_model_params(model)
        refuse_hooks(
            *(model, self._chosen, "FunctionalGradientComputer"), "Take IterativeGradientComputer"
        )
        self.func_weights = dict(model.named_parameters())
        self.func_buffers = dict(model.named_buffers())

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return names of the chosen parameters to gradients (B, *shape)."""
        differentiated = self._for_classification(batch)
        if differentiated is not None:
            method, given = differentiated
            return formed_gradients(method, *given).gradients
        value = _Value(self.model, self.modelout_fn, functional=True)
        try:
            return _gradients_by_vmap(value, self._chosen, batch)
        except RuntimeError as error:
            if not re.search(r"vmap|functorch|batching rule", str(error), re.IGNORECASE):
                raise
            reason = str(error).splitlines()[0].split(". ")[0]
            raise InputError(
                "`torch.func.vmap` must be able to run the task's get_output and the model. Found "
                f"that it cannot ({reason}). Give TRAKer "
                "`gradient_computer=IterativeGradientComputer`, which calls get_output with a "
                "batch of one and with weights and buffers None.",
                code="compat.vmap",
            ) from error

    def _for_classification(self, batch: Sequence[Tensor]) -> _Differentiated | None:
        """Return how to differentiate a classification without vmap, None if that can't be."""
        if type(self.modelout_fn) not in _ONE_PASS:
            return None
        samples = cast(ClassificationModelOutput, self.modelout_fn).as_samples(batch)
        given = self.model, self._chosen, CLASSIFICATION, as_batch(samples, CLASSIFICATION)
        if self._method is None:
            if len(batch[0]) == 1:
                return gradients_one_by_one, given
            self._method, _ = choose_method(*given)
        return (self._method, given) if self._method is gradients_at_once else None

    @property
    def is_as_it_came(self) -> bool:
        """Whether no subclass and no replaced method, here or in the task, changes a number."""
        replaced = {"compute_per_sample_grad", "compute_loss_grad"} & set(vars(self))
        task = type(self.modelout_fn)
        of_task = {name for name in vars(self.modelout_fn) if callable(getattr(task, name, None))}
        return type(self) is FunctionalGradientComputer and not replaced and not of_task

    def project_at_once(
        self, batch: Sequence[Tensor], projection: ProjectionSpec, rows: np.ndarray
    ) -> list[Tensor] | None:
        """Return unscaled features (B, k) and loss weights (B, 1), without forming gradients.

        None where samples need another way than one pass, or where Q is that of a temperature.
        Gradients that are not finite raise an error, which names samples by ``rows``.
        """
        differentiated = self._for_classification(batch)
        if differentiated is None or getattr(self.modelout_fn, "loss_temperature", 1) != 1:
            return None
        method, given = differentiated
        sums = Features.zeros(self._chosen, [projection], len(rows), torch.get_num_threads())
        try:
            _, _, loss_weights, _ = method(*given, sums)
        except NotFiniteError:
            explain_not_finite(*given, rows.tolist())
            raise
        if not sums.rows[0].isfinite().all():
            explain_not_finite(*given, rows.tolist())
        return [sums.rows[0], loss_weights[:, None]]


class IterativeGradientComputer(_OfChosenParameters):
    """Gradients by autograd in a loop, for what ``vmap`` cannot run; shape (B, grad_dim).

    The task's ``get_output`` is called once a sample, with weights and buffers None. It gets a
    batch of one, or the sample itself where the task has ``per_sample = True``.

    Example:
        >>> import torch
        >>> from trak_core.compat.modelout_functions import IterativeImageClassificationModelOutput
        >>> model, task = torch.nn.Linear(5, 3), IterativeImageClassificationModelOutput()
        >>> computer = IterativeGradientComputer(model, task, device="cpu")
        >>> computer.compute_per_sample_grad((torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))).shape
        torch.Size([4, 18])
    """

    def load_model_params(self, model: nn.Module) -> None:
        """Set ``model_params``, the parameters to differentiate."""
        super().load_model_params(model)
        self.model_params = list(self._chosen.values())

    def compute_per_sample_grad(self, batch: Sequence[Tensor]) -> Tensor:
        """Return the gradients side by side, shape (B, grad_dim)."""
        value = _Value(self.model, self.modelout_fn, functional=False)
        formed = formed_gradients(gradients_one_by_one, value, self._chosen, _VALUE, tuple(batch))
        return vectorize(formed.gradients, device=self.model_params[0].device)
