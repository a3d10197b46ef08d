"""TRAK's model outputs f(z; theta) and their loss weights Q, one class a task.

The numbers are those of ``trak_core.model_outputs``. A class of a user's own needs the two methods
of ``AbstractModelOutput``.
"""

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


def is_as_it_came(thing: object) -> bool:
    """Whether no subclass and no replaced method of the user's own may change a number."""
    kind = type(thing)
    is_ours = kind.__module__.startswith(f"{__package__}.")
    return is_ours and not any(hasattr(kind, name) for name in vars(thing))


def _called(
    model: nn.Module, weights: Weights, buffers: Weights, /, *args: Tensor, **kwargs: Tensor
) -> Any:
    """Call a model, with ``weights`` and ``buffers`` in place of its own if there are any."""
    if weights is None:
        return model(*args, **kwargs)
    return functional_call(model, {**weights, **(buffers or {})}, args, kwargs)


class AbstractModelOutput(ABC):
    """A model output f, and the loss weight that goes with it."""

    # Whether get_output takes a sample without batch dimension also where weights are None.
    per_sample: ClassVar[bool] = False

    # Subclasses name the sample's parts, so the type checker has to look away there.
    @abstractmethod
    def get_output(
        self, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return f of one sample, a scalar, of the model with these weights and buffers."""

    @abstractmethod
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return Q of each sample of a batch, shape (B, 1)."""


class ImageClassificationModelOutput(AbstractModelOutput):
    """The log-odds of the label, f = log(p / (1 - p)), of a model that returns logits.

    The label comes last. The temperature of the training loss enters Q only.
    """

    per_sample = True
    # The model's arguments, where it takes them by name.
    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, temperature: float = 1.0) -> None:
        self.loss_temperature = temperature

    @classmethod
    def _logits(
        cls, model: nn.Module, weights: Weights, buffers: Weights, inputs: Sequence[Tensor]
    ) -> Tensor:
        named = dict(zip(cls.names, inputs, strict=True)) if cls.names else {}
        return read_logits(_called(model, weights, buffers, *([] if named else inputs), **named))

    @classmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return the margin of inputs and their label, without batch dimension: a scalar."""
        *inputs, label = sample
        logits = cls._logits(model, weights, buffers, [t.unsqueeze(0) for t in inputs])
        return margin(logits.squeeze(0), label)

    @torch.no_grad()
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return Q = 1 - p_y, shape (B, 1), precise where p_y is close to 1."""
        *inputs, labels = batch
        logits = self._logits(model, weights, buffers, inputs)
        return probability_weight(margin(logits / self.loss_temperature, labels)).unsqueeze(-1)


class IterativeImageClassificationModelOutput(ImageClassificationModelOutput):
    """The same margin of a whole batch at once, for ``IterativeGradientComputer``."""

    per_sample = False

    @classmethod
    def get_output(
        cls, model: nn.Module, weights: Weights, buffers: Weights, *sample: Tensor
    ) -> Tensor:
        """Return the margins of a batch, shape (B,)."""
        *inputs, labels = sample
        return margin(cls._logits(model, weights, buffers, inputs), labels)


class TextClassificationModelOutput(ImageClassificationModelOutput):
    """The margin of a model that takes input_ids, token_type_ids and attention_mask by name."""

    names = ("input_ids", "token_type_ids", "attention_mask")


def classification_batch(task: AbstractModelOutput, batch: Sequence[Tensor]) -> Batch | None:
    """Return a classification's samples for ``trak_core.gradients``; None if f may be another."""
    if not (isinstance(task, ImageClassificationModelOutput) and is_as_it_came(task)):
        return None
    named = dict(zip((*task.names, "labels"), batch, strict=True)) if task.names else None
    return as_batch(named or batch, CLASSIFICATION)


class CLIPModelOutput(AbstractModelOutput):
    """The contrastive margin of an image and its text against a simulated batch.

    f is the sum of ``trak_core.model_outputs.clip.pair_margins``. The others are ``sim_batch_size``
    pairs, drawn uniformly once by ``get_embeddings`` under a fixed seed. The model is called as
    open_clip's are, with ``image`` and ``text``, and returns image embeddings, text embeddings and
    the logit scale, which the training loss's ``temperature`` replaces.

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
        """Embed the first ``size`` pairs of a loader, which yields batches of images and texts.

        ``batch_size`` and ``embedding_dim`` are not needed.
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
        """Choose the simulated batch, ahead of vmap, which has random numbers of its own."""
        n, size = CLIPModelOutput.num_computed_embeddings, CLIPModelOutput.sim_batch_size
        CLIPModelOutput._picked = drawn_pairs(n, size, seed=0)

    @staticmethod
    def _contrast(scale: float) -> ModelOutput:
        u, v = CLIPModelOutput.image_embeddings, CLIPModelOutput.text_embeddings
        if u is None or v is None:
            words = "A pair is compared with others. Found none: call `get_embeddings` of the task."
            raise InputError(words, code="compat.no_embeddings")
        return contrast(u[CLIPModelOutput._picked], v[CLIPModelOutput._picked], scale)

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module, weights: Weights, buffers: Weights, image: Tensor, label: Tensor
    ) -> Tensor:
        """Return f of one image and its text (``label``), a scalar."""
        returned = _called(model, weights, buffers, image=image[None], text=label[None])
        return CLIPModelOutput._contrast(1.0).value(read_embeddings(returned)[0], label)

    @torch.no_grad()
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return Q, shape (B, 1): 1 - p of the pair in the simulated batch, mean of both ways."""
        images, texts = batch
        returned = _called(model, weights, buffers, image=images, text=texts)
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
