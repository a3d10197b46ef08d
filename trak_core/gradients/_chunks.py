"""How many samples to differentiate at once, so that they fit into memory."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients._batch import Samples, as_batch
from trak_core.gradients._per_sample import in_evaluation_mode
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.system.faults import is_out_of_memory

T = TypeVar("T")

# What vmap holds at its peak, in units of one pass's gradients and kept activations; measured for
# perceptrons, ResNets, BERT and GPT-2 it is 1 and up to 3.
_GRADIENTS, _ACTIVATIONS = 2, 3


def sample_bytes(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    output: ModelOutput,
    samples: Samples,
) -> int:
    """Estimate the memory that differentiating one sample takes, by a forward pass of one.

    Args:
        model: On the samples' device.
        parameters: From ``select_parameters``.
        output: The model output.
        samples: See ``as_batch``; the first counts.

    Returns:
        Bytes for gradients and for the activations kept for them, at their peak.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    # A storage of its own: what is kept is counted by whole storages.
    sample = as_batch(samples, output).mapped(lambda tensor: tensor[:1].clone())
    with (
        in_evaluation_mode(model),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        outputs = output.read(sample.given_to(model)).squeeze(0)
        output.value(outputs, sample.labels[0])
    gradients = sum(p.numel() * p.element_size() for p in parameters.values())
    return _GRADIENTS * gradients + _ACTIVATIONS * sum(kept.values())


def samples_that_fit(needed_bytes: int, device: torch.device, memory_mb: int) -> int:
    """Return how many samples fit, at least one.

    Args:
        needed_bytes: By one sample, from ``sample_bytes``.
        device: Of the model. On CUDA four fifths of its free memory count, whatever ``memory_mb``.
        memory_mb: MiB for arrays on the CPU.

    Raises:
        InputError: If one sample does not fit.
    """
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * 4 // 5
        what, remedy = "The GPU's free memory", "Use a larger GPU"
    else:
        budget = memory_mb * 2**20
        what, remedy = "compute.memory_mb", "Raise it"
    if needed_bytes > budget:
        raise InputError(
            f"{what} must hold the gradient of one sample: about {-(-needed_bytes // 2**20)} MiB. "
            f"Found {budget // 2**20}. {remedy}, or choose fewer `parameters`."
        )
    return budget // max(1, needed_bytes)


def in_chunks(
    compute: Callable[[int, int], T], n_samples: int, chunk: int
) -> Iterator[tuple[int, int, T]]:
    """Compute chunks of samples, and halve the chunk for good whenever memory runs out.

    Args:
        compute: From start and stop to a result.
        n_samples: How many there are.
        chunk: How many at once at first.

    Yields:
        Start and stop of each chunk, in order, and its result.

    Raises:
        InputError: If memory runs out for a single sample.
    """
    start = 0
    while start < n_samples:
        stop = min(start + chunk, n_samples)
        try:
            result = compute(start, stop)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if stop - start == 1:
                found = (str(error).splitlines() or [""])[0]
                raise InputError(
                    "Memory must hold the gradient of one sample. It ran out: "
                    f"{found} Give the job more memory (on a cluster by "
                    "--set-resources RULE:mem_mb=...), or choose fewer `parameters`."
                ) from error
            chunk = (stop - start) // 2
            print(f"Notice: out of memory; going on with {chunk} samples at once.", flush=True)
        else:
            yield start, stop, result
            start = stop
            continue
        # After the exception has let go of its tensors.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
