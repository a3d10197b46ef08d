"""Compute per-sample gradients of a model output, parameter by parameter, never as a whole.

The layout of the whole project is fixed here: a gradient has one coordinate a parameter entry, the
parameters in ``named_parameters`` order, each row-major. A batch is differentiated by one backward
pass (``gradients_at_once``), or sample by sample where a model's graph can't be read. Gradients go
to a consumer as they come, for instance to ``trak_core.attribution.project_gradients``.

Functions take the same things: a ``model`` on the samples' device, in any mode, which they leave as
it was; the ``parameters`` to differentiate, from ``select_parameters``; the model ``output`` f;
``samples`` as ``as_batch`` takes them; and ``sample_ids``, which messages name.
"""

from trak_core.gradients.batch_size import (
    MemoryByLength,
    Room,
    SampleMemory,
    budget_bytes,
    in_chunks,
    memory_by_length,
    sample_memory,
    samples_that_fit,
)
from trak_core.gradients.check_gradients import (
    Variety,
    check_finite,
    check_finite_gramian,
    check_labels,
    check_samples_apart,
    count_classes,
    explain_not_finite,
    refuse_not_finite,
)
from trak_core.gradients.choose_method import choose_method, gradient_method
from trak_core.gradients.differentiable_model import (
    graph_to,
    in_evaluation_mode,
    memory_formats_kept_apart,
    n_params,
    refuse_hooks,
    select_parameters,
)
from trak_core.gradients.gradient_methods import (
    METHODS,
    GradientMethod,
    PerSample,
    as_blocks,
    beside_gradient,
    columns_of,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    per_sample,
)
from trak_core.gradients.model_inputs import (
    Batch,
    Samples,
    Shapes,
    as_batch,
    call,
    joined,
    shapes_of,
)

__all__ = ["Batch", "Samples", "Shapes", "as_batch", "call", "joined", "shapes_of"]
__all__ += ["MemoryByLength", "Room", "SampleMemory", "budget_bytes", "in_chunks"]
__all__ += ["memory_by_length", "sample_memory", "samples_that_fit"]
__all__ += ["check_finite", "check_finite_gramian", "check_labels", "check_samples_apart"]
__all__ += ["count_classes", "explain_not_finite", "refuse_hooks", "refuse_not_finite"]
__all__ += ["GradientMethod", "choose_method", "formed_gradients", "gradient_method"]
__all__ += ["METHODS", "gradients_at_once", "gradients_one_by_one"]
__all__ += ["gradients_in_turn", "memory_formats_kept_apart"]
__all__ += ["PerSample", "as_blocks", "beside_gradient", "columns_of", "graph_to"]
__all__ += ["Variety", "in_evaluation_mode", "n_params", "per_sample", "select_parameters"]
