"""Load a model with the weights of one checkpoint, and find its parameters and model output."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.attribution.batch_by_length import OrderedSamples, order_samples
from trak_core.attribution.deferred_logits import MarginsOfTokens, vocabulary_size
from trak_core.attribution.device import set_float32_precision
from trak_core.attribution.sample_outputs import N_OTHERS, OTHERS_SEED, model_output
from trak_core.dependency_digests import parameters_digest
from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    GradientMethod,
    MemoryByLength,
    as_batch,
    budget_bytes,
    call,
    check_labels,
    check_samples_apart,
    count_classes,
    gradient_method,
    in_evaluation_mode,
    joined,
    memory_by_length,
    select_parameters,
)
from trak_core.gradients.batch_size import PIECE_BYTES, TooMuchMemoryError
from trak_core.gradients.recompute_activations import Recomputation
from trak_core.model_outputs.about_outputs import about_output
from trak_core.model_outputs.model_output import ModelOutput, over_samples
from trak_core.runtime.job import release_freed_memory
from trak_core.runtime.progress import print_line
from trak_core.settings import TRAIN, FeaturesSpec
from trak_core.study.dataset_split import Split
from trak_core.study.load_checkpoint import load_checkpoint, load_state_dict, state_dict_sha256
from trak_core.study.optimizer_state import adam_scales
from trak_core.study.study import Study

# The number of samples that are checked before any gradients are computed, and the number of
# samples whose model outputs are compared with stored ones.
_FEW = 8
# The bytes that each logit needs if all logits of a text are computed together. GPT-2 and Llama
# need 11 to 16.
_LOGIT_BYTES = 16
# If all logits of a text would need more than 1/4 of the memory, they are computed in pieces.
_LOGITS_SHARE = 4
# The memory for one piece of the logits and for the copies that exist at the same time.
_LOGIT_PIECES_BYTES = 4 * PIECE_BYTES

# A function that chooses the gradient method for a loaded model and a few samples. With the keyword
# argument ``reads_terms=True``, the method must compute the terms whose sum is a gradient.
MethodOf = Callable[..., GradientMethod]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with the weights of a checkpoint, on a device, and the model output f.

    Attributes:
        parameters: The parameters for which gradients are computed, by name.
        checkpoint_digests: SHA-256 digests of the weight files (key ``sha256``), and of other files
            that affect results.
        blocks: The model's repeated blocks, such as transformer layers. If a sample needs much
            memory, their activations are recomputed in the backward pass.
        scales: Factors that multiply the entries of gradients, by parameter name, or None.
        method_of: Chooses the gradient method, given this object and a few samples. The default
            compares the gradients of two samples.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    device: torch.device
    checkpoint_digests: Mapping[str, str]
    blocks: Recomputation
    scales: dict[str, Tensor] | None = None
    method_of: MethodOf = lambda loaded, few, **more: gradient_method(
        loaded.model, loaded.parameters, loaded.output, few, **more
    )

    @classmethod
    def of_study(
        cls, study: Study, checkpoint: Path, spec: FeaturesSpec, device: torch.device
    ) -> Self:
        """Return a study's model with the weights of the file or folder ``checkpoint``."""
        pairs = study.split(TRAIN, None) if about_output(spec.model_output).needs_pairs else None
        return cls.load(study.make_model, checkpoint, spec, device, pairs=pairs, study=study)

    @classmethod
    def load(
        cls,
        make_model: Callable[[], nn.Module],
        weights: Path | Mapping[str, Tensor] | None,
        spec: FeaturesSpec,
        device: torch.device,
        *,
        output: ModelOutput | None = None,
        pairs: Split | None = None,
        study: Study | None = None,
    ) -> Self:
        """Return the model with weights from a path or state dict. None keeps the model's weights.

        If ``output`` is None, the function ``model_output`` is called with ``pairs`` and ``study``
        to find the model output that ``spec`` names.
        """
        # make_model() must not change torch's random state, because a study's data may depend on
        # this state, and jobs that only show samples do not call make_model().
        with torch.random.fork_rng(devices=[]):
            model = make_model()
        # The model is moved before the weights are read, so that they are not in memory twice.
        model.to(device)
        if isinstance(weights, Path):
            part = (spec.state_dicts or {}).get(spec.checkpoint or "")
            digests = load_checkpoint(model, weights, part)
        else:
            if weights is not None:
                load_state_dict(model, weights, f"checkpoint {spec.checkpoint}")
            digests = {"sha256": state_dict_sha256(model.state_dict())}
        set_float32_precision(spec.precision)  # To find CLIP's model output, the model is called.
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        parameters = select_parameters(model, spec.parameter_patterns)
        if output is None:
            output = model_output(spec.model_output, model, pairs, device, study)
        scales = None
        if spec.preconditioner is not None:
            if not isinstance(weights, Path):
                raise InputError(
                    "`preconditioner: adam` needs the optimizer's state, which is read from a "
                    f"checkpoint's files. The checkpoint {spec.checkpoint} has no files, because "
                    "its weights are in memory. Pass the path of the checkpoint.",
                    code="model.no_optimizer_path",
                )
            on_cpu, digests["optimizer_sha256"] = adam_scales(model, parameters, trained, weights)
            scales = {name: scale.to(device) for name, scale in on_cpu.items()}
        blocks = Recomputation(model)
        release_freed_memory()
        set_float32_precision(spec.precision)  # The user's code may have changed the precision.
        return cls(model, parameters, output, device, digests, blocks, scales)

    def ordered(self, *splits: Split, window: int | None = None) -> list[OrderedSamples]:
        """Return the result of ``order_samples`` for this model and its output."""
        return order_samples(splits, self.model, self.output, window)

    def batch(self, samples: OrderedSamples, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop - 1`` as a batch on the model's device."""
        return self._on_device(samples.batch(start, stop))

    def checked(
        self, samples: OrderedSamples, start: int, stop: int, n_classes: int | None
    ) -> Batch:
        """Return the result of ``batch`` after checking the labels.

        The labels are checked before they are copied to a GPU, so that the CPU need not wait for
        it.
        """
        batch = samples.batch(start, stop)
        check_labels(batch.labels, self.output, n_classes, samples.split.ids[start:stop])
        return self._on_device(batch)

    def _on_device(self, batch: Batch) -> Batch:
        def moved(tensor: Tensor) -> Tensor:
            if self.device.type == "cuda" and tensor.device.type == "cpu":
                # A copy from pinned memory does not wait for the GPU.
                return tensor.pin_memory().to(self.device, non_blocking=True)
            return tensor.to(self.device)

        needs_labels = isinstance(self.model, MarginsOfTokens)
        return replace(batch.mapped(moved), gives_labels=batch.gives_labels or needs_labels)

    def in_pieces(self, samples: OrderedSamples, memory_mb: int) -> Self:
        """Return this model or, if all logits need much memory, one that computes a few at a time.

        Model outputs are the same up to rounding. If logits are computed in pieces, ``few`` prints
        a notice.
        """
        if not self.output.joins_tokens or self.output.takes_labels:
            return self
        (longest,) = samples.few(1)
        n_tokens = self.batch(samples, longest, longest + 1).labels.shape[-1]
        most_bytes = budget_bytes(self.device, memory_mb) // _LOGITS_SHARE
        if _LOGIT_BYTES * n_tokens * vocabulary_size(self.model) <= most_bytes:
            return self
        model = MarginsOfTokens(self.model, self.output)
        return replace(self, model=model, output=model.output)

    def few(self, samples: OrderedSamples) -> tuple[Batch, int | None]:
        """Return a batch of a few samples, the longest text first, and the number of classes."""
        positions = samples.few(_FEW)
        few = joined([self.batch(samples, i, i + 1) for i in positions])
        with samples.naming_longest():
            n_classes = count_classes(self.model, self.output, few, self.device)
        if isinstance(self.model, MarginsOfTokens):
            print_line(f"Notice: {self.model.notice(few.labels.shape[1])}")
        check_labels(few.labels, self.output, n_classes, [samples.split.ids[i] for i in positions])
        return few, n_classes

    def memory(self, few: Batch, memory_mb: int) -> MemoryByLength:
        """Return the memory that computing a sample's gradients needs, measured with ``few``.

        If one sample needs more than ``memory_mb``, a notice is printed, and all later backward
        passes recompute activations to save memory.
        """
        try:
            if self.blocks.is_on or not self.blocks.blocks:
                return self._memory(few, None)
            budget = budget_bytes(self.device, memory_mb)
            with suppress(TooMuchMemoryError):
                needed = self._memory(few, budget)
                if needed.of_longest.bytes_of(1) <= budget:
                    return needed
            self.blocks.start()
            needed = self._memory(few, None)
            print_line(f"Notice: {self.blocks.notice()}")
            return needed
        finally:
            release_freed_memory()

    def _memory(self, few: Batch, most_bytes: int | None) -> MemoryByLength:
        given = self.model, self.parameters, self.output, few
        needed = memory_by_length(*given, self.blocks, most_bytes)
        if not isinstance(self.model, MarginsOfTokens):
            return needed
        return needed.mapped(lambda memory: replace(memory, shared_bytes=_LOGIT_PIECES_BYTES))

    def reproduces(self, data: Split, columns: Mapping[str, np.ndarray]) -> bool:
        """Return whether the model still gives the stored values, up to rounding.

        Model outputs, loss weights and any curvatures of eight samples are compared, which detects
        most changes of the model's code, the output function and the data. ``columns`` are the
        stored values of all samples, shape (n,) each.
        """
        rows = np.unique(np.linspace(0, len(data.ids) - 1, _FEW).astype(int))
        functions = {"outputs": self.output.value, "loss_weights": self.output.loss_weight}
        if self.output.curvature is not None and "curvature" in columns:
            functions["curvature"] = self.output.curvature
        current = []
        with torch.no_grad(), in_evaluation_mode(self.model):
            for row in rows.tolist():
                batch = as_batch(data.batch(row, row + 1), self.output)
                batch = batch.mapped(lambda tensor: tensor.to(self.device))
                read = self.output.read(call(self.model, batch))
                values = [over_samples(f, read, batch.labels) for f in functions.values()]
                current.append([value.double().item() for value in values])
        stored = np.stack([columns[key] for key in functions], axis=1)
        # Rounding can change values by this fraction if the batch size or the precision differs.
        cuda = 4e-3 if torch.get_float32_matmul_precision() == "high" else 1e-3
        eps = max(torch.finfo(p.dtype).eps for p in self.parameters.values())
        rounding = max(1e-4 if self.device.type == "cpu" else cuda, 4 * eps)
        most = rounding * np.abs(stored).max(axis=0)
        return bool((np.abs(stored[rows] - np.array(current)) <= most).all())

    def check_apart(self, few: Batch, at_once: int) -> None:
        """Raise an error if a sample's model output depends on the other samples of a batch."""
        check_samples_apart(self.model, self.output, few.rows(slice(0, max(2, at_once))))

    def file_spec(self, spec: FeaturesSpec, projection: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that determine features or inner products, to store in their file."""
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        file_spec = spec.as_dict() | {
            "projection": dict(projection),
            "parameters_digest": parameters_digest(shapes),
            "checkpoint": {"id": spec.checkpoint, **self.checkpoint_digests},
        }
        if about_output(spec.model_output).needs_pairs:
            file_spec["other_pairs"] = {"drawn": N_OTHERS, "seed": OTHERS_SEED}
        return file_spec
