"""Compute the gradient of a model output for each sample.

The model output f is one number for each sample, such as the margin of the correct class. The
gradient of f has p entries, one for each entry of the parameters. Parameters are in
``named_parameters`` order, and the entries of each parameter in row-major order.

Usually, one backward pass computes the gradients of all samples of a batch (``gradients_at_once``).
If this is impossible for a model, autograd computes the gradient of one sample at a time. As soon
as the gradients with respect to a parameter are computed, they are passed to a *consumer*, such as
a random projection. The (batch, p) matrix of all gradients is never stored.

Most functions take a ``model`` on the samples' device, the ``parameters`` that
``select_parameters`` returned, and the model output f as ``output``. ``samples`` have a form that
``as_batch`` accepts, and error messages name samples by their ``sample_ids``. After the call, the
model is in training or evaluation mode as before.
"""

from trak_core.gradients.batch_size import (
    MemoryBudget,
    MemoryByLength,
    budget_bytes,
    in_chunks,
    memory_by_length,
    sample_memory,
)
from trak_core.gradients.check_gradients import (
    Variety,
    check_labels,
    check_samples_apart,
    count_classes,
    explain_not_finite,
)
from trak_core.gradients.choose_method import choose_method, gradient_method
from trak_core.gradients.differentiable_model import (
    in_evaluation_mode,
    n_params,
    refuse_hooks,
    select_parameters,
)
from trak_core.gradients.gradient_methods import (
    METHODS,
    GradientMethod,
    PerSample,
    as_blocks,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
)
from trak_core.gradients.model_inputs import Batch, Samples, as_batch, call, joined, shapes_of

__all__ = ["METHODS", "Batch", "GradientMethod", "MemoryBudget", "MemoryByLength", "PerSample"]
__all__ += ["Samples", "Variety", "as_batch", "as_blocks", "budget_bytes", "call", "check_labels"]
__all__ += ["check_samples_apart", "choose_method", "count_classes", "explain_not_finite"]
__all__ += ["formed_gradients", "gradient_method", "gradients_at_once", "gradients_in_turn"]
__all__ += ["gradients_one_by_one", "in_chunks", "in_evaluation_mode", "joined", "memory_by_length"]
__all__ += ["n_params", "refuse_hooks", "sample_memory", "select_parameters", "shapes_of"]
