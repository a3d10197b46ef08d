"""Compute the model outputs f and the loss weights Q of ``trak``, with one class for each task."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trak_core.errors import InputError
from trak_core.gradients import Batch, as_batch
from trak_core.model_outputs.clip import contrast, drawn_pairs, read_embeddings
from trak_core.model_outputs.model_output import ModelOutput, over_samples, read_logits
from trak_core.model_outputs.supervised import CLASSIFICATION, margin, probability_weight

Weights = Mapping[str, Tensor] | None


def is_unmodified(instance: object) -> bool:
    """Return whether an object's class is defined in this package and no method is replaced."""
    kind = type(instance)
    is_builtin = kind.__module__.startswith(f"{__package__}.")
    return is_builtin and not any(hasattr(kind, name) for name in vars(instance))


def _call(
    model: nn.Module, weights: Weights, buffers: Weights, /, *args: Tensor, **kwargs: Tensor
) -> Any:
    """Call a model with the given weights and buffers, or with its own if ``weights`` is None."""
    if weights is None:
        return model(*args, **kwargs)
    return functional_call(model, {**weights, **(buffers or {})}, args, kwargs)


class AbstractModelOutput(ABC):
    """The base class of model outputs f with their loss weights Q."""

    # If this is true, get_output takes a sample without batch dimension even if weights is None.
    per_sample: ClassVar[bool] = False

    @abstractmethod
    def get_output(
        self, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return the model output f of one sample, a scalar, with these weights and buffers."""

    @abstractmethod
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return the loss weight Q of each sample of a batch, shape (B, 1)."""


class ImageClassificationModelOutput(AbstractModelOutput):
    """The log-odds of a sample's label, for a model that returns logits.

    The label is the last entry of a sample. ``temperature`` is the softmax temperature of the
    training loss. It changes the loss weights Q, but not the model output f.
    """

    per_sample = True
    # The names of the model's inputs, in the order of a batch, or () for positional inputs.
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, temperature: float = 1.0) -> None:
        self.loss_temperature = temperature

    @classmethod
    def _logits(
        cls, model: nn.Module, weights: Weights, buffers: Weights, inputs: Sequence[Tensor]
    ) -> Tensor:
        if cls.names:
            named = dict(zip(cls.names, inputs, strict=True))
            return read_logits(_call(model, weights, buffers, **named))
        return read_logits(_call(model, weights, buffers, *inputs))

    @classmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return the log-odds of the label of one sample without batch dimension, a scalar."""
        *inputs, label = sample
        logits = cls._logits(model, weights, buffers, [t.unsqueeze(0) for t in inputs])
        return margin(logits.squeeze(0), label)

    @torch.no_grad()
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return 1 - p(label), shape (B, 1), which is accurate even if p(label) is close to 1."""
        *inputs, labels = batch
        logits = self._logits(model, weights, buffers, inputs)
        return probability_weight(margin(logits / self.loss_temperature, labels)).unsqueeze(-1)


class IterativeImageClassificationModelOutput(ImageClassificationModelOutput):
    """The log-odds of the labels of a batch, for ``IterativeGradientComputer``."""

    per_sample = False

    @classmethod
    def get_output(
        cls, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return the log-odds of the label of each sample in a batch, shape (B,)."""
        *inputs, labels = sample
        return margin(cls._logits(model, weights, buffers, inputs), labels)


class TextClassificationModelOutput(ImageClassificationModelOutput):
    """The log-odds of the label, for a model of texts.

    The model takes ``input_ids``, ``token_type_ids`` and ``attention_mask``.
    """

    names = ("input_ids", "token_type_ids", "attention_mask")


def classification_batch(task: AbstractModelOutput, batch: Sequence[Tensor]) -> Batch | None:
    """Return a batch for ``CLASSIFICATION``, or None if the task has another model output."""
    if not (isinstance(task, ImageClassificationModelOutput) and is_unmodified(task)):
        return None
    named = dict(zip((*task.names, "labels"), batch, strict=True)) if task.names else None
    return as_batch(named or batch, CLASSIFICATION)


class CLIPModelOutput(AbstractModelOutput):
    """How well an image and its text match, compared with the other pairs of a simulated batch.

    The model output is the log-odds of the text among the batch's texts, plus the log-odds of the
    image among its images. The other pairs of the batch are drawn with a fixed seed. The model
    takes ``image`` and ``text`` and returns image embeddings, text embeddings and the logit scale,
    as open_clip's models do. If ``temperature`` is given, it is used instead of the logit scale.

    Source: Park et al., "TRAK", ICML 2023, section 5.1.
    """

    per_sample = True
    num_computed_embeddings: ClassVar[int] = 0
    sim_batch_size: ClassVar[int] = 0
    image_embeddings: ClassVar[Tensor | None] = None
    text_embeddings: ClassVar[Tensor | None] = None
    _picked: ClassVar[Sequence[int]] = ()

    def __init__(self, temperature: float | None = None, simulated_batch_size: int = 300) -> None:
        self.temperature = temperature
        CLIPModelOutput.sim_batch_size = simulated_batch_size
        CLIPModelOutput._draw()

    @staticmethod
    def get_embeddings(
        model: nn.Module,
        loader: Iterable[Any],
        batch_size: int,
        embedding_dim: int,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Tensor] | None = None,
        preprocess_fn_txt: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Compute and keep the embeddings of the first ``size`` pairs from ``loader``.

        ``loader`` yields batches (images, texts). Simulated batches are drawn from these pairs.
        """
        parts: list[Tensor] = []
        with torch.no_grad():
            for images, texts in loader:
                images = preprocess_fn_img(images) if preprocess_fn_img else images
                texts = preprocess_fn_txt(texts) if preprocess_fn_txt else texts
                parts.append(read_embeddings(model(image=images, text=texts)))
                if sum(map(len, parts)) >= size:
                    break
        u, v = torch.cat(parts)[:size].unbind(1)
        CLIPModelOutput.image_embeddings, CLIPModelOutput.text_embeddings = u, v
        CLIPModelOutput.num_computed_embeddings = len(u)
        CLIPModelOutput._draw()

    @staticmethod
    def _draw() -> None:
        """Draw the simulated batch, before ``torch.vmap`` could draw one for each sample."""
        n, size = CLIPModelOutput.num_computed_embeddings, CLIPModelOutput.sim_batch_size
        CLIPModelOutput._picked = drawn_pairs(n, size, seed=0)

    @staticmethod
    def _contrast(scale: float) -> ModelOutput:
        u, v = CLIPModelOutput.image_embeddings, CLIPModelOutput.text_embeddings
        if u is None or v is None:
            message = "CLIP's model output needs embeddings of pairs. Call `get_embeddings` first."
            raise InputError(message, code="compat.no_embeddings")
        return contrast(u[CLIPModelOutput._picked], v[CLIPModelOutput._picked], scale)

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module, weights: Weights, buffers: Weights, image: Tensor, label: Tensor
    ) -> Tensor:
        """Return the model output of one ``image`` and its text ``label``, a scalar."""
        returned = _call(model, weights, buffers, image=image[None], text=label[None])
        return CLIPModelOutput._contrast(1.0).value(read_embeddings(returned)[0], label)

    @torch.no_grad()
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return the mean of 1 - p(text | image) and 1 - p(image | text), shape (B, 1)."""
        images, texts = batch
        returned = _call(model, weights, buffers, image=images, text=texts)
        scale = self.temperature
        if scale is None:
            scale = returned["logit_scale"] if isinstance(returned, Mapping) else returned[2]
        loss_weight = self._contrast(float(scale)).loss_weight
        return over_samples(loss_weight, read_embeddings(returned), texts).unsqueeze(-1)


TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "clip": CLIPModelOutput,
    "text_classification": TextClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
}
