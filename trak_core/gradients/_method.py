"""How a model's gradients are to be computed: at once by vmap, or one by one."""

from collections.abc import Callable

from torch import nn

from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._loop import looped_gradients
from trak_core.gradients._per_sample import PerSample, in_evaluation_mode
from trak_core.gradients._precision import rounding
from trak_core.gradients._vmap import per_sample_gradients
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.system.faults import is_out_of_memory

GradientMethod = Callable[[nn.Module, dict[str, nn.Parameter], ModelOutput, Samples], PerSample]


def _largest_difference(found: PerSample, expected: PerSample) -> float:
    """Return the largest difference of two gradients, in units of the largest entry."""
    pairs = [(found.gradients[name], block) for name, block in expected.gradients.items()]
    largest = max(float(block.abs().max()) for _, block in pairs if block.numel())
    difference = max(float((a - b).abs().max()) for a, b in pairs if b.numel())
    return difference / largest if largest > 0 else difference


def gradient_method(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> GradientMethod:
    """Try vmap on two samples beside plain autograd, and say so if it cannot take the model.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output f.
        samples: Some samples, see ``as_batch``; the first two count.

    Returns:
        ``per_sample_gradients``, or ``looped_gradients`` where vmap fails on this model or gives
        other numbers than autograd; a line is printed then, with the reason.
    """
    few = as_batch(samples, output).rows(slice(0, 2))
    expected = looped_gradients(model, parameters, output, few)
    try:
        found = per_sample_gradients(model, parameters, output, few)
    except Exception as error:
        if is_out_of_memory(error):
            return per_sample_gradients
        reason = f"fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    else:
        difference = _largest_difference(found, expected)
        with in_evaluation_mode(model):
            allowed = rounding(model, few)
        # NaN in both is for check_finite to explain, with sample and parameter.
        if difference != difference or difference <= allowed:
            return per_sample_gradients
        reason = f"differs from autograd by {difference:.1g} of the largest entry"
    print(
        f"Notice: torch.func.vmap cannot take this model; it {reason}. Gradients are computed "
        "one sample at a time, with the same numbers but slower.",
        flush=True,
    )
    return looped_gradients
