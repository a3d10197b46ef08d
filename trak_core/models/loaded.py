"""What gradients are taken of: a study's model under one checkpoint, and a look at its samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from trak_core.gradients import (
    Batch,
    as_batch,
    check_labels,
    check_samples_apart,
    count_classes,
    select_parameters,
)
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.table import TABLE
from trak_core.models.named_output import N_OTHERS, OTHERS_SEED, model_output
from trak_core.provenance import parameters_digest
from trak_core.spec import FeaturesSpec
from trak_core.study.checkpoints import load_checkpoint, weights_sha256
from trak_core.study.study import TRAIN, Split, Study

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
    """

    study: Study
    model: nn.Module
    parameters: dict[str, nn.Parameter]
    output: ModelOutput
    device: torch.device

    @classmethod
    def load(
        cls, study_file: Path, checkpoint: Path, spec: FeaturesSpec, device: torch.device
    ) -> Self:
        """Make the study's model and load its weights.

        Args:
            study_file: The study's Python file.
            checkpoint: File or folder with the weights.
            spec: Its model output and patterns of parameters count here.
            device: Where to compute.

        Returns:
            The model with its weights, and the samples' source.

        Raises:
            InputError: If study or checkpoint are not what they must be.
        """
        study = Study.load(study_file)
        model = study.make_model()
        load_checkpoint(model, checkpoint)
        model.to(device)
        parameters = select_parameters(model, spec.parameter_patterns)
        pairs = study.split(TRAIN, None) if TABLE[spec.model_output].needs_pairs else None
        output = model_output(spec.model_output, model, pairs, device)
        return cls(study, model, parameters, output, device)

    def batch(self, split: Split, start: int, stop: int) -> Batch:
        """Return the samples from ``start`` to ``stop`` on the model's device."""
        batch = as_batch(split.batch(start, stop), self.output)
        return batch.mapped(lambda tensor: tensor.to(self.device))

    def few(self, split: Split, start: int, stop: int) -> tuple[Batch, int | None]:
        """Take the first few samples from ``start`` on and check their labels.

        Returns:
            The samples, and how many classes a label may be of (see ``count_classes``).

        Raises:
            InputError: If the model cannot take them, or cannot have been trained with such labels.
        """
        stop = min(start + _FEW, stop)
        few = self.batch(split, start, stop)
        n_classes = count_classes(self.model, self.output, few, self.device)
        check_labels(few.labels, self.output, n_classes, split.ids[start:stop])
        return few, n_classes

    def check_apart(self, few: Batch, at_once: int) -> None:
        """Make sure that samples don't count for each other, of as many as will be together.

        Raises:
            InputError: If they do; it names the layer.
        """
        check_samples_apart(self.model, self.output, few.rows(slice(0, max(2, at_once))))

    def file_spec(
        self, spec: FeaturesSpec, checkpoint: Path, projection: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a file says of itself: all that decides its numbers.

        Args:
            spec: From the config.
            checkpoint: File or folder with the weights.
            projection: What becomes of the gradients.
        """
        found = spec.as_dict() | {
            "projection": dict(projection),
            "parameters_digest": parameters_digest({
                n: p.shape for n, p in self.parameters.items()
            }),
            "checkpoint": {"id": spec.checkpoint} | weights_sha256(self.model, checkpoint),
        }
        if TABLE[spec.model_output].needs_pairs:
            found["other_pairs"] = {"drawn": N_OTHERS, "seed": OTHERS_SEED}
        return found
