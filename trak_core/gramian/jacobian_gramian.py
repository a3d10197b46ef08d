"""Compute the Gramian K = J J^T of a Jacobian J, shape (n, p), without forming J."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, is_out_of_memory
from trak_core.gradients.gradient_terms import Consumer, Contribution, add_product, summed_parts
from trak_core.gradients.graph import UnreadableGraphError
from trak_core.gradients.one_pass import by_rows, by_samples
from trak_core.gradients.sample_owner_rules import MixedSamplesError


class Engine:
    """Compute J J^T, where J is the Jacobian of an output with respect to modules' parameters.

    The engine reads the autograd graph of a finished forward pass, so dropout is the same as in the
    output. It adds no hooks to modules, and changes neither the graph nor any ``.grad``.

    With ``batch_dim``, one backward pass is run for all samples. Let a linear layer compute
    y_t = W x_t at each position t, and let delta_t be the gradient of the output f with respect to
    y_t. The inner product of the gradients of samples i and j is

        <dW_i, dW_j> = sum_{t of i, t' of j} <x_t, x_t'> <delta_t, delta_t'>.

    Similar formulas are used for convolutions, embeddings, normalization layers, and parameters
    that are added or multiplied. Other operations are differentiated once for each sample. If an
    operation mixes samples, as a recurrent layer does, gradients are propagated to the operation's
    inputs as without ``batch_dim``.

    Without ``batch_dim``, the gradients of all entries of the output are propagated together, to
    one parameter after another. The same is done if parameters or modules have backward hooks,
    because hooks may change each row of J.
    With ``batch_dim``, hooks on tensors that are computed from parameters, such as views, are
    ignored.

    Args:
        modules: Modules that contain the parameters with respect to which J is the Jacobian. A
            shared parameter counts once. Parameters without ``requires_grad`` are ignored.
        batch_dim: The dimension of the output that indexes samples, if each sample's entries of the
            output depend only on this sample's data. Otherwise None.

    Raises:
        InputError: If there is no module.

    Example:
        >>> import torch
        >>> from trak_core.gramian import Engine
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> inputs = torch.tensor([[1.0, 2, 3], [0, 1, 0]])
        >>> losses = model(inputs).squeeze(1)  # the gradient of a loss is the sample's input
        >>> Engine(model, batch_dim=0).compute_gramian(losses)
        tensor([[14.,  2.],
                [ 2.,  1.]])

    Source: Quinton and Rey, "Jacobian Descent for Multi-Objective Optimization", arXiv 2406.16232,
    section 6, on uses of the Gramian. The algorithm is new.
    """

    def __init__(self, *modules: nn.Module, batch_dim: int | None = None):
        if not modules:
            raise InputError(
                "The engine needs at least one module. Found none. Pass the model, as in "
                "Engine(model).",
                code="gramian.no_module",
            )
        self._modules = modules
        self._batch_dim = batch_dim

    def compute_gramian(self, output: Tensor) -> Tensor:
        """Return J J^T for an output of shape [m1, ..., mk].

        Args:
            output: A real tensor of any shape, with an autograd graph.

        Returns:
            Shape [m1, ..., mk, mk, ..., m1], with the output's dtype and device. The entry
            [i1, ..., ik, jk, ..., j1] is the inner product of the gradients of output[i1, ..., ik]
            and output[j1, ..., jk]. All entries are 0 if the output depends on no parameter.

        Raises:
            InputError: If the output has no graph or no dimension ``batch_dim``, or if a module
                computes statistics along ``batch_dim``.
            RuntimeError: If an operation cannot be differentiated, for example because an earlier
                backward pass has freed its saved tensors.
        """
        if not (isinstance(output, Tensor) and output.requires_grad):
            kind = "a tensor without it" if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"The output must be a tensor with requires_grad=True. Found {kind}. "
                "Call the modules outside of torch.no_grad(), and do not detach the output.",
                code="gramian.no_graph",
            )
        parameters = [p for m in self._modules for p in m.parameters() if p.requires_grad]
        order, dim, gramian = list(range(output.ndim)), self._batch_dim, None
        with torch.no_grad():
            if dim is not None and (gramian := _by_samples(output, parameters, dim)) is not None:
                order.append(order.pop(dim))
            if gramian is None:
                gramian = output.new_zeros(output.numel(), output.numel())
                by_rows(_Products(gramian), output, parameters)
        shape = [output.shape[dim] for dim in order]
        back = [order.index(dim) for dim in range(output.ndim)]
        ahead = [output.ndim + dim for dim in reversed(back)]
        return gramian.view(shape + shape).permute(back + ahead)


def _by_samples(output: Tensor, parameters: Sequence[Tensor], batch_dim: int) -> Tensor | None:
    """Return J J^T from one backward pass for all samples, or None if this is impossible.

    Rows are ordered by the output's dimensions other than ``batch_dim``, and then by ``batch_dim``.
    """
    if not -output.ndim <= batch_dim < output.ndim:
        raise InputError(
            f"The output must have the dimension batch_dim = {batch_dim}. Found an output of shape "
            f"{tuple(output.shape)}. Compute one output or loss for each sample, for example with "
            'reduction="none", or leave batch_dim out.',
            code="gramian.batch_dim",
        )
    dim = batch_dim % output.ndim
    gramian = output.new_zeros(output.numel(), output.numel())
    try:
        by_samples(_Products(gramian), output, parameters, dim, keep_graph=True)
    except MixedSamplesError:
        raise InputError(
            "Samples must be independent. Found batch normalization over samples, in training mode "
            "or without running statistics. Put the model into evaluation mode before the forward "
            "pass, replace the layers by GroupNorm, or create the Engine without batch_dim.",
            code="gramian.mixed_samples",
        ) from None
    except UnreadableGraphError:
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        # Probably vmap does not support an operation. If the cause is another error, ``by_rows``
        # raises it again.
        return None
    return gramian


class _Products(Consumer):
    """A consumer of gradients that adds their inner products to ``gramian``, shape (rows, rows)."""

    in_order = False

    def __init__(self, gramian: Tensor):
        self.begin([gramian])

    def take(self, parameter: Tensor, uses: Sequence[Contribution]) -> None:
        (gramian,) = self.totals
        if len(uses) == 1:
            uses[0].add_to(gramian)
        else:
            for _, rows in summed_parts(uses):
                add_product(gramian, rows)
