"""Load a study's model under one checkpoint, with its parameters and model output."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trak_core.gradients import (
    Batch,
    MemoryByLength,
    check_labels,
    check_samples_apart,
    count_classes,
    joined,
    memory_by_length,
    select_parameters,
)
from trak_core.model.named_output import N_OTHERS, OTHERS_SEED, model_output
from trak_core.model.sample_order import Arranged, Kept, arranged
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.table import TABLE
from trak_core.provenance import parameters_digest
from trak_core.spec import TRAIN, FeaturesSpec
from trak_core.study.checkpoints import load_checkpoint
from trak_core.study.optimizer_state import adam_scales
from trak_core.study.split import Split
from trak_core.study.study import Study

# Samples that are looked at before the expensive work.
_FEW = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with a checkpoint's weights, on its device.

    Attributes:
        study: Where its samples come from.
        model: The study's model.
        parameters: Those to differentiate.
        output: The model output f.
        device: Where the model is.
        checkpoint_digests: SHA-256 of what was read from the checkpoint: ``sha256`` of the weights'
            files, and what else decides numbers.
        scales: By name, what each entry of gradients is multiplied by; None for nothing.
    """

    study: Study
    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    device: torch.device
    checkpoint_digests: Mapping[str, str]
    scales: dict[str, Tensor] | None = None

    @classmethod
    def load(
        cls, study_file: Path, checkpoint: Path, spec: FeaturesSpec, device: torch.device
    ) -> Self:
        """Make the study's model and load its weights.

        Args:
            study_file: The study's Python file.
            checkpoint: File or folder with the weights.
            spec: Its model output, patterns of parameters and preconditioner count here.
            device: Where to compute.

        Returns:
            The model with its weights, and the samples' source.

        Raises:
            InputError: If study or checkpoint are not what they must be.
        """
        study = Study.load(study_file)
        model = study.make_model()
        digests = load_checkpoint(model, checkpoint)
        model.to(device)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        parameters = select_parameters(model, spec.parameter_patterns)
        pairs = study.split(TRAIN, None) if TABLE[spec.model_output].needs_pairs else None
        output = model_output(spec.model_output, model, pairs, device)
        scales = None
        if spec.preconditioner is not None:
            on_cpu, digests["optimizer_sha256"] = adam_scales(
                model, parameters, trained, checkpoint
            )
            scales = {name: scale.to(device) for name, scale in on_cpu.items()}
        return cls(study, model, parameters, output, device, digests, scales)

    def arranged(self, *splits: Split, window: int | None = None) -> list[Arranged]:
        """Return the samples of splits in the order in which to take them; see ``arranged``."""
        return arranged(splits, self.model, self.output, window)

    def batch(self, samples: Arranged, start: int, stop: int) -> Batch:
        """Return the samples from ``start`` to ``stop`` on the model's device."""
        return samples.batch(start, stop).mapped(lambda tensor: tensor.to(self.device))

    def kept(self, samples: Arranged) -> Kept:
        """Read all samples, to be kept in memory on the model's device."""
        parts = [self.batch(samples, i, i + 1) for i in range(len(samples))]
        return Kept(parts, samples.split.ids, samples.rows)

    def few(self, samples: Arranged) -> tuple[Batch, int | None]:
        """Take a few samples, of texts of different lengths the longest first, and check labels.

        Returns:
            The samples, and how many classes a label may be of (see ``count_classes``).

        Raises:
            InputError: If the model cannot take them, or cannot have been trained with such labels.
        """
        places = samples.few(_FEW)
        few = joined([self.batch(samples, i, i + 1) for i in places])
        with samples.blaming_the_longest():
            n_classes = count_classes(self.model, self.output, few, self.device)
        check_labels(few.labels, self.output, n_classes, [samples.split.ids[i] for i in places])
        return few, n_classes

    def memory(self, few: Batch) -> MemoryByLength:
        """Measure what differentiating a sample takes, by a few of them."""
        return memory_by_length(self.model, self.parameters, self.output, few)

    def check_apart(self, few: Batch, at_once: int) -> None:
        """Make sure that samples don't count for each other, of as many as will be together.

        Raises:
            InputError: If they do; it names the layer.
        """
        check_samples_apart(self.model, self.output, few.rows(slice(0, max(2, at_once))))

    def file_spec(self, spec: FeaturesSpec, projection: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a file says of itself: all that decides its numbers.

        Args:
            spec: From the config.
            projection: What becomes of the gradients.
        """
        found = spec.as_dict() | {
            "projection": dict(projection),
            "parameters_digest": parameters_digest({
                n: p.shape for n, p in self.parameters.items()
            }),
            "checkpoint": {"id": spec.checkpoint, **self.checkpoint_digests},
        }
        if TABLE[spec.model_output].needs_pairs:
            found["other_pairs"] = {"drawn": N_OTHERS, "seed": OTHERS_SEED}
        return found
