"""The model output of CLIP: the log-odds of an image-text pair among other pairs."""

from collections.abc import Mapping

import torch
from torch import Tensor

from trak_core.errors import InputError
from trak_core.model_outputs.model_output import ModelOutput, at_least_float32


def pair_margins(
    image: Tensor, text: Tensor, other_images: Tensor, other_texts: Tensor, scale: float = 1.0
) -> Tensor:
    """Return the log-odds of a pair's text among texts, and of the pair's image among images.

    Let u and v be the embeddings of the pair's image and text, and u_i and v_j those of the other
    pairs. The log-odds are -log sum_j exp(s <u, v_j - v>) and -log sum_i exp(s <u_i - u, v>).

    ``image`` and ``text`` have shape (..., d). ``other_images`` and ``other_texts`` have shape
    (others, d). TRAK sets the scale s to 1. The result has shape (..., 2), float32 or float64.

    Source: Park et al., "TRAK", ICML 2023, section 5.1 (f is the sum of the two).
    """
    u, v = at_least_float32(image), at_least_float32(text)
    own = (u * v).sum(-1, keepdim=True)
    among_texts = scale * (u @ other_texts.to(u.dtype).T - own)
    among_images = scale * (v @ other_images.to(v.dtype).T - own)
    return -torch.stack([among_texts.logsumexp(-1), among_images.logsumexp(-1)], dim=-1)


def drawn_pairs(n_pairs: int, n_drawn: int, seed: int) -> list[int]:
    """Return the sorted indices of ``n_drawn`` random pairs, or of all pairs if there are fewer."""
    order = torch.randperm(n_pairs, generator=torch.Generator().manual_seed(seed))
    return sorted(order[:n_drawn].tolist())


def read_embeddings(returned: object) -> Tensor:
    """Return the image and text embeddings in a model's return value, shape (batch, 2, d).

    The model must return an object with ``image_embeds`` and ``text_embeds`` (transformers), a
    mapping with ``image_features`` and ``text_features``, or a tuple that starts with both
    embeddings (open_clip).
    """
    pair: tuple[object, ...] = ()
    if isinstance(returned, Mapping) and "image_features" in returned:
        pair = returned["image_features"], returned["text_features"]
    elif hasattr(returned, "image_embeds"):
        pair = returned.image_embeds, returned.text_embeds  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(returned, tuple):
        pair = returned[:2]
    if len(pair) < 2 or not all(isinstance(part, Tensor) for part in pair):
        raise InputError(
            "The model must return embeddings of images and texts: an object with `image_embeds` "
            "and `text_embeds`, a dict with `image_features` and `text_features`, or a tuple "
            f"that starts with both embeddings. Found {type(returned).__name__}.",
            code="model_outputs.embeddings",
        )
    return torch.stack([part for part in pair if isinstance(part, Tensor)], dim=1)


def contrast(other_images: Tensor, other_texts: Tensor, scale: float) -> ModelOutput:
    """Return the model output of image-text pairs: the sum of both results of ``pair_margins``.

    The embeddings of other pairs, shape (others, d), and the scale are constants in the gradient.
    """

    def margins(outputs: Tensor) -> Tensor:
        return pair_margins(outputs[0], outputs[1], other_images, other_texts, scale)

    # Let a and b be the two log-odds. The loss is l = log(1 + exp(-a)) + log(1 + exp(-b)), and
    # f = a + b. If a and b change by the same amount, the loss weight -dl/df is the mean of
    # sigmoid(-a) and sigmoid(-b).
    return ModelOutput(
        read=read_embeddings,
        value=lambda outputs, label: margins(outputs).sum(),
        loss_weight=lambda outputs, label: torch.sigmoid(-margins(outputs)).mean(),
        curvature=None,
        prediction=lambda outputs, label: (margins(outputs) > 0).all().float(),
        has_labels=False,
    )
