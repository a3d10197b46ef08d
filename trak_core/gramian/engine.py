"""The Gramian of a Jacobian, without the Jacobian."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trak_core.errors import InputError
from trak_core.gramian.parameters import parameter_gramian
from trak_core.one_pass.rules import MixedSamplesError


class Engine:
    """Computes J J^T, J the Jacobian of an output with respect to the parameters of modules.

    The engine reads the computation graph that a forward pass has left. It hangs nothing on the
    modules, keeps nothing from one call to the next, and leaves the graph as it was, for
    ``output.backward(weights)`` for instance. Nobody's ``.grad`` changes. The Gramian is that of
    the forward pass that was made, dropout and all.

    With ``batch_dim`` one backward pass serves all samples as far as the graph says which entries
    of a tensor belong to which sample. Where a parameter comes in, the inner products of the
    samples' gradients come from the saved inputs and the gradients of the outputs: for linear
    layers, convolutions, embeddings, normalisation layers, and parameters that are added or
    multiplied. Any other operation is differentiated once for each sample, and what lies below an
    operation that the engine cannot see through, a recurrent layer say, as without ``batch_dim``;
    that takes longer, but the result is the same.

    Without it all rows of the Jacobian go through the graph at a time, parameter by parameter.

    Args:
        modules: Their parameters, and those of their children, count if ``requires_grad``. None may
            be part of another.
        batch_dim: The dimension of the output along which samples are independent: the entries of
            sample b depend on sample b of the data alone. None if there is none.

    Raises:
        InputError: If there is no module, or if one is part of another.

    Example:
        >>> import torch
        >>> from trak_core.gramian import Engine
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> inputs = torch.tensor([[1.0, 2, 3], [0, 1, 0]])
        >>> losses = model(inputs).squeeze(1)  # the gradient of each is its input
        >>> Engine(model, batch_dim=0).compute_gramian(losses)
        tensor([[14.,  2.],
                [ 2.,  1.]])

    Source: Quinton and Rey, "Jacobian Descent for Multi-Objective Optimization", arXiv 2406.16232,
    section 6, for what the Gramian is good for. The way it is computed here is our own.
    """

    def __init__(self, *modules: nn.Module, batch_dim: int | None = None):
        """See the class."""
        if not modules:
            raise InputError(
                "The engine needs at least one module. Found none.", code="gramian.no_module"
            )
        for i, module in enumerate(modules):
            for j, other in enumerate(modules):
                if i != j and any(part is module for part in other.modules()):
                    raise InputError(
                        "None of the engine's modules may be part of another, or be there twice. "
                        f"Found {type(module).__name__} (number {i + 1}) in "
                        f"{type(other).__name__} (number {j + 1}). Leave the inner one out: its "
                        "parameters count as parameters of the outer one.",
                        code="gramian.nested_module",
                    )
        self._modules = modules
        self._batch_dim = batch_dim

    def compute_gramian(self, output: Tensor) -> Tensor:
        """Return J J^T for an output of shape [m1, ..., mk].

        Args:
            output: Real numbers with a graph, of any shape.

        Returns:
            Shape [m1, ..., mk, mk, ..., m1], the output's dtype, on its device: entry
            [i1, ..., ik, jk, ..., j1] is the inner product of the gradients of output[i1, ..., ik]
            and output[j1, ..., jk]. Zero if the output doesn't depend on the parameters.

        Raises:
            InputError: If the output has no graph, if it has no dimension ``batch_dim``, or if a
                module takes statistics over samples that ``batch_dim`` says are independent.
            RuntimeError: If an operation of the graph cannot be differentiated, for example because
                an earlier backward pass has freed it.
        """
        parameters = [
            parameter
            for module in self._modules
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        try:
            return parameter_gramian(output, parameters, self._batch_dim)
        except MixedSamplesError:
            raise InputError(self._explain_mixing(), code="gramian.mixed_samples") from None

    def _explain_mixing(self) -> str:
        names = [
            f"{name or 'the module itself'} ({type(part).__name__})"
            for module in self._modules
            for name, part in module.named_modules()
            if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)
        ]
        found = ", ".join(names) or "a batch normalisation"
        return (
            "With batch_dim, samples must be independent. Found statistics over the samples in "
            f"{found}. Put it in evaluation mode before the forward pass, replace it (by GroupNorm "
            "or InstanceNorm, say), or leave batch_dim out, which is slower but always right."
        )
