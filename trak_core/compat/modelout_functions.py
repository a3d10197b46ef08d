"""Compute TRAK's model outputs f(z; theta) and their loss weights Q, one class a task.

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
from trak_core.gradients import check_labels
from trak_core.model_outputs.clip import drawn_pairs, pair_margins
from trak_core.model_outputs.model_output import read_logits
from trak_core.model_outputs.supervised import CLASSIFICATION, margin

Weights = Mapping[str, Tensor] | None


def _called(
    model: nn.Module, weights: Weights, buffers: Weights, /, *args: Tensor, **kwargs: Tensor
) -> Any:
    """Call a model, with ``weights`` and ``buffers`` in place of its own if there are any."""
    if weights is None:
        return model(*args, **kwargs)
    return functional_call(model, {**weights, **(buffers or {})}, args, kwargs)


def _logits(
    model: nn.Module,
    weights: Weights,
    buffers: Weights,
    inputs: Sequence[Tensor],
    names: Sequence[str] = (),
) -> Tensor:
    """Return the logits of a batch, (B, classes), from inputs by position or by name."""
    named = dict(zip(names, inputs, strict=True)) if names else {}
    return read_logits(_called(model, weights, buffers, *([] if named else inputs), **named))


def _pair(
    model: nn.Module, weights: Weights, buffers: Weights, images: Tensor, texts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings of images and texts, and the logit scale, of a model like open_clip's."""
    returned = _called(model, weights, buffers, image=images, text=texts)
    if isinstance(returned, Mapping):
        keys = ("image_features", "text_features", "logit_scale")
        returned = tuple(returned[key] for key in keys)
    image, text, scale, *_ = returned
    return image, text, scale


class AbstractModelOutput(ABC):
    """A model output f, and the loss weight that goes with it.

    Example:
        A regression's output, for a TRAKer with ``task=Prediction()``:

        >>> import torch
        >>> class Prediction(AbstractModelOutput):
        ...     def __init__(self):
        ...         pass
        ...
        ...     def get_output(self, model, weights, buffers, x, y):
        ...         call = torch.func.functional_call
        ...         return call(model, (weights, buffers), (x.unsqueeze(0),)).squeeze()
        ...
        ...     def get_out_to_loss_grad(self, model, weights, buffers, batch):
        ...         x, y = batch
        ...         return model(x).detach() - y.unsqueeze(1)
        >>> model = torch.nn.Linear(3, 1)
        >>> Prediction().get_output(model, model.state_dict(), {}, torch.ones(3), None).ndim
        0
    """

    # True where get_output takes one sample without batch dimension, False where it takes a batch.
    per_sample: ClassVar[bool] = False

    @abstractmethod
    def __init__(self) -> None:
        """Keep settings."""

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


class ClassificationModelOutput(AbstractModelOutput):
    """A classification: the label comes last in a batch, and the model returns logits."""

    # The model's arguments, where it takes them by name.
    _names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, temperature: float = 1.0) -> None:
        """Take the temperature of the training loss, which enters Q only."""
        self.loss_temperature = temperature

    def as_samples(self, batch: Sequence[Tensor]) -> Sequence[Tensor] | dict[str, Tensor]:
        """Return a batch as ``trak_core.gradients`` takes it."""
        names = self._names
        return dict(zip((*names, "labels"), batch, strict=True)) if names else tuple(batch)

    @torch.no_grad()
    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return Q = 1 - p_y, shape (B, 1), precise where p_y is close to 1."""
        *inputs, labels = batch
        logits = _logits(model, weights, buffers, inputs, self._names)
        check_labels(labels, CLASSIFICATION, logits.shape[-1], range(len(labels)))
        margins = margin(logits / self.loss_temperature, labels)
        return torch.sigmoid(-margins).unsqueeze(-1)


class ImageClassificationModelOutput(ClassificationModelOutput):
    """The log-odds of the label, f = log(p / (1 - p)), of a model that returns logits."""

    per_sample = True

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module, weights: Weights, buffers: Weights, image: Tensor, label: Tensor
    ) -> Tensor:
        """Return the margin of one image without batch dimension, a scalar."""
        return margin(_logits(model, weights, buffers, [image.unsqueeze(0)]).squeeze(0), label)


class IterativeImageClassificationModelOutput(ClassificationModelOutput):
    """The same margin of a whole batch at once, for ``IterativeGradientComputer``."""

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module, weights: Weights, buffers: Weights, images: Tensor, labels: Tensor
    ) -> Tensor:
        """Return the margins of a batch, shape (B,)."""
        return margin(_logits(model, weights, buffers, [images]), labels)


class TextClassificationModelOutput(ClassificationModelOutput):
    """The margin of a model that takes input_ids, token_type_ids and attention_mask by name."""

    per_sample = True
    _names = ("input_ids", "token_type_ids", "attention_mask")

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module,
        weights: Weights,
        buffers: Weights,
        input_id: Tensor,
        token_type_id: Tensor,
        attention_mask: Tensor,
        label: Tensor,
    ) -> Tensor:
        """Return the margin of one text without batch dimension, a scalar."""
        inputs = [t.unsqueeze(0) for t in (input_id, token_type_id, attention_mask)]
        names = TextClassificationModelOutput._names
        return margin(_logits(model, weights, buffers, inputs, names).squeeze(0), label)


def classification_samples(
    task: AbstractModelOutput, batch: Sequence[Tensor]
) -> Sequence[Tensor] | dict[str, Tensor] | None:
    """Return a batch as ``trak_core.gradients`` takes it; None if f is no classification here.

    A subclass of the user's own may compute anything, so it is none.
    """
    kinds = (
        ImageClassificationModelOutput,
        IterativeImageClassificationModelOutput,
        TextClassificationModelOutput,
    )
    return task.as_samples(batch) if isinstance(task, kinds) and type(task) in kinds else None


class CLIPModelOutput(AbstractModelOutput):
    """The contrastive margin of an image and its text against a simulated batch.

    f = -log sum_j exp(-<u, v - v_j>) - log sum_i exp(-<v, u - u_i>) for the pair's embeddings u, v
    and those of ``sim_batch_size`` others, drawn uniformly once by ``get_embeddings`` under a fixed
    seed and the same for every sample. The model is called as open_clip's are, with ``image`` and
    ``text``, and returns image embeddings, text embeddings and the logit scale.

    Source: Park et al., "TRAK", ICML 2023, section 5.1.
    """

    per_sample = True
    num_computed_embeddings: ClassVar[int] = 0
    sim_batch_size: ClassVar[int] = 0
    image_embeddings: ClassVar[Tensor | None] = None
    text_embeddings: ClassVar[Tensor | None] = None
    _picked: ClassVar[list[int] | None] = None

    def __init__(self, temperature: float | None = None, simulated_batch_size: int = 300) -> None:
        """Take the temperature of the training loss (the model's own if None)."""
        self.temperature = temperature
        CLIPModelOutput.sim_batch_size = simulated_batch_size
        CLIPModelOutput._draw()

    @staticmethod
    def get_embeddings(
        model: nn.Module,
        loader: Iterable[Sequence[Tensor]],
        batch_size: int,
        embedding_dim: int,
        size: int = 50_000,
        preprocess_fn_img: Callable[[Any], Tensor] | None = None,
        preprocess_fn_txt: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Keep the embeddings of up to ``size`` pairs as class attributes, on the model's device.

        ``loader`` yields batches of images and texts, of any size, which the two functions
        preprocess. ``batch_size`` and ``embedding_dim`` are not needed.
        """
        parts: list[tuple[Tensor, Tensor]] = []
        count = 0
        with torch.no_grad():
            for images, texts in loader:
                if count >= size:
                    break
                images = preprocess_fn_img(images) if preprocess_fn_img else images
                texts = preprocess_fn_txt(texts) if preprocess_fn_txt else texts
                u, v, _ = _pair(model, None, None, images, texts)
                parts.append((u[: size - count].detach(), v[: size - count].detach()))
                count += len(parts[-1][0])
        CLIPModelOutput.image_embeddings = torch.cat([u for u, _ in parts])
        CLIPModelOutput.text_embeddings = torch.cat([v for _, v in parts])
        CLIPModelOutput.num_computed_embeddings = count
        CLIPModelOutput._draw()

    @staticmethod
    def _draw() -> None:
        """Choose the simulated batch, ahead of vmap, which has random numbers of its own."""
        u, size = CLIPModelOutput.image_embeddings, CLIPModelOutput.sim_batch_size
        CLIPModelOutput._picked = None if u is None else drawn_pairs(len(u), size, seed=0)

    @staticmethod
    def _others() -> tuple[Tensor, Tensor]:
        """Return the simulated batch: the same uniform draw every time."""
        u, v = CLIPModelOutput.image_embeddings, CLIPModelOutput.text_embeddings
        picked = CLIPModelOutput._picked
        if u is None or v is None or picked is None:
            raise InputError(
                "CLIP's model output compares a pair with others. Found none: call "
                "`traker.task.get_embeddings(model, loader, ...)` before featurizing.",
                code="compat.no_embeddings",
            )
        return u[picked], v[picked]

    @staticmethod
    def get_output(  # pyright: ignore[reportIncompatibleMethodOverride]
        model: nn.Module, weights: Weights, buffers: Weights, image: Tensor, label: Tensor
    ) -> Tensor:
        """Return f of one image and its text (``label``), a scalar."""
        others_u, others_v = CLIPModelOutput._others()
        u, v, _ = _pair(model, weights, buffers, image.unsqueeze(0), label.unsqueeze(0))
        return pair_margins(u.squeeze(0), v.squeeze(0), others_u, others_v).sum()

    def get_out_to_loss_grad(
        self, model: nn.Module, weights: Weights, buffers: Weights, batch: Iterable[Tensor]
    ) -> Tensor:
        """Return Q, shape (B, 1): 1 - p of the pair in the simulated batch, mean of both ways.

        It does not depend on the other pairs of ``batch``.
        """
        images, texts = batch
        others_u, others_v = CLIPModelOutput._others()
        with torch.no_grad():
            u, v, scale = _pair(model, weights, buffers, images, texts)
            scale = scale if self.temperature is None else self.temperature
            margins = pair_margins(u, v, others_u, others_v, float(scale))
        return torch.sigmoid(-margins).mean(-1, keepdim=True)


TASK_TO_MODELOUT: dict[str, type[AbstractModelOutput]] = {
    "image_classification": ImageClassificationModelOutput,
    "clip": CLIPModelOutput,
    "text_classification": TextClassificationModelOutput,
    "iterative_image_classification": IterativeImageClassificationModelOutput,
}
