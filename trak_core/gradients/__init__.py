"""Per-sample gradients of a model output, handed over parameter by parameter, never as a whole.

The layout of the whole project is fixed here: a gradient has one coordinate a parameter entry, the
parameters in ``named_parameters`` order, each row-major. A batch is differentiated by one backward
pass (``gradients_at_once``), or sample by sample where a model's graph can't be read; what comes
goes to a consumer, ``models.projected`` for one.
"""

from trak_core.gradients._alike import Shapes, shapes_of
from trak_core.gradients._apart import check_samples_apart
from trak_core.gradients._at_once import gradients_at_once
from trak_core.gradients._batch import Batch, Samples, as_batch
from trak_core.gradients._by_length import MemoryByLength, Room, memory_by_length
from trak_core.gradients._call import call
from trak_core.gradients._chunks import SampleMemory, in_chunks, sample_memory, samples_that_fit
from trak_core.gradients._columns import columns_of
from trak_core.gradients._finite import (
    check_finite,
    check_finite_gramian,
    explain_not_finite,
    refuse_not_finite,
)
from trak_core.gradients._formed import formed_gradients
from trak_core.gradients._joined import joined
from trak_core.gradients._labels import check_labels, count_classes
from trak_core.gradients._method import GradientMethod, gradient_method, why_not_at_once
from trak_core.gradients._one_by_one import gradients_one_by_one
from trak_core.gradients._parameters import n_params, select_parameters
from trak_core.gradients._per_sample import (
    PerSample,
    as_blocks,
    beside_gradient,
    graph_to,
    in_evaluation_mode,
    per_sample,
)

__all__ = [
    "Batch",
    "GradientMethod",
    "MemoryByLength",
    "PerSample",
    "Room",
    "SampleMemory",
    "Samples",
    "Shapes",
    "as_batch",
    "as_blocks",
    "beside_gradient",
    "call",
    "check_finite",
    "check_finite_gramian",
    "check_labels",
    "check_samples_apart",
    "columns_of",
    "count_classes",
    "explain_not_finite",
    "formed_gradients",
    "gradient_method",
    "gradients_at_once",
    "gradients_one_by_one",
    "graph_to",
    "in_chunks",
    "in_evaluation_mode",
    "joined",
    "memory_by_length",
    "n_params",
    "per_sample",
    "refuse_not_finite",
    "sample_memory",
    "samples_that_fit",
    "select_parameters",
    "shapes_of",
    "why_not_at_once",
]
