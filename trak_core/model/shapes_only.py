"""Build a study's model without its numbers, where names and shapes are all that is needed."""

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trak_core.gradients import Batch, count_classes
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.table import about_output
from trak_core.study.study import Study

_CPU = torch.device("cpu")


class StudyModel:
    """A study's model for a look at names, shapes and classes, in evaluation mode on the CPU.

    ``without_numbers`` saves time and memory where the model is large: torch's fake tensors have
    shapes and dtypes, and operations on them compute shapes. What they can't do is done with the
    model itself: a ``make_model`` or a forward pass that looks at numbers, or fails, and outputs
    that need embeddings. So all errors are the model's own.

    Attributes:
        module: The model.
    """

    def __init__(self, study: Study, model_output: str, *, without_numbers: bool) -> None:
        self._study = study
        self._mode: FakeTensorMode | None = None
        self.module = nn.Module()
        if without_numbers and not about_output(model_output).needs_pairs:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            # Fake modules can't be moved to another dtype, and from_pretrained refuses torch's meta
            # device: each way builds what the other can't.
            for context in (torch.device("meta"), mode):
                with suppress(Exception), _quiet(), context:
                    self.module, self._mode = _fake(study.make_model().eval(), mode), mode
                    break
        if self._mode is None:
            self._take_numbers()

    def _take_numbers(self) -> None:
        self.module, self._mode = self._study.make_model().eval(), None

    def count_classes(self, output: ModelOutput, sample: Batch) -> int | None:
        """Return what ``trak_core.gradients.count_classes`` returns, or raise what it raises."""
        if self._mode is not None:
            with suppress(Exception), self._mode, _quiet():
                return count_classes(self.module, output, sample, _CPU)
            self._take_numbers()
        return count_classes(self.module, output, sample, _CPU)


def _fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Give a model fake tensors on the CPU; tied ones stay tied."""
    fakes: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, FakeTensor):
                    continue
                if id(tensor) not in fakes:
                    with mode:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = (
                        nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    )
                tensors[name] = fakes[id(tensor)]  # pyright: ignore[reportArgumentType]
    return model


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Silence torch's words about what fake tensors can't do."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
