"""Per-sample gradients of a model output, as blocks of one parameter each.

The layout of the whole project is fixed here: a gradient has one coordinate a parameter entry, the
parameters in ``named_parameters`` order, each row-major; n samples give an (n, p) matrix whose
columns come as blocks, so that nothing is ever concatenated.
"""

from trak_core.gradients._apart import check_samples_apart
from trak_core.gradients._batch import Batch, Samples, as_batch
from trak_core.gradients._call import call
from trak_core.gradients._chunks import in_chunks, sample_bytes, samples_that_fit
from trak_core.gradients._columns import columns_of
from trak_core.gradients._finite import check_finite, check_finite_gramian, refuse_not_finite
from trak_core.gradients._labels import check_labels, count_classes
from trak_core.gradients._loop import looped_gradients
from trak_core.gradients._method import GradientMethod, gradient_method
from trak_core.gradients._parameters import n_params, select_parameters
from trak_core.gradients._per_sample import PerSample, as_blocks, in_evaluation_mode
from trak_core.gradients._vmap import per_sample_gradients

__all__ = [
    "Batch",
    "GradientMethod",
    "PerSample",
    "Samples",
    "as_batch",
    "as_blocks",
    "call",
    "check_finite",
    "check_finite_gramian",
    "check_labels",
    "check_samples_apart",
    "columns_of",
    "count_classes",
    "gradient_method",
    "in_chunks",
    "in_evaluation_mode",
    "looped_gradients",
    "n_params",
    "per_sample_gradients",
    "refuse_not_finite",
    "sample_bytes",
    "samples_that_fit",
    "select_parameters",
]
