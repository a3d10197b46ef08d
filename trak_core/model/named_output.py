"""The model output that a config names, under one checkpoint."""

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import as_batch, call, in_evaluation_mode
from trak_core.model_outputs.clip import contrast, drawn_pairs, read_embeddings
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.table import TABLE
from trak_core.study.study import Split

# Of the pairs that a pair is to stand out among: TRAK's own number, and the seed of their draw.
N_OTHERS = 300
OTHERS_SEED = 0
# Says that pairs come without labels.
_UNLABELLED = contrast(torch.zeros(0, 0), torch.zeros(0, 0), 1.0)


def _scale(model: nn.Module) -> float:
    """Return the factor of a CLIP model's inner products."""
    found = [p for name, p in model.named_parameters() if name.split(".")[-1] == "logit_scale"]
    if len(found) != 1 or found[0].numel() != 1:
        raise InputError(
            "model_output clip needs a model with one parameter `logit_scale`, the logarithm of "
            f"the factor of its inner products. Found {len(found)}."
        )
    return found[0].detach().exp().item()


def model_output(
    name: str, model: nn.Module, pairs: Split | None, device: torch.device, n_others: int = N_OTHERS
) -> ModelOutput:
    """Return a model output by its name.

    Others to tell pairs apart from are drawn from the training pairs, uniformly and the same for
    every checkpoint, and embedded under this checkpoint.

    Args:
        name: A key of ``TABLE``.
        model: With its weights, on ``device``.
        pairs: Where to draw from; read only where the output's row ``needs_pairs``.
        device: Where the model is.
        n_others: How many to draw.

    Raises:
        InputError: If a model for pairs has no ``logit_scale`` or cannot take its samples.
    """
    about = TABLE[name]
    if not about.needs_pairs:
        return about.load()
    assert pairs is not None
    embeddings: list[Tensor] = []
    with torch.no_grad(), in_evaluation_mode(model):
        for i in drawn_pairs(len(pairs.ids), n_others, OTHERS_SEED):
            pair = as_batch(pairs.batch(i, i + 1), _UNLABELLED)
            returned = call(model, pair.mapped(lambda tensor: tensor.to(device)))
            embeddings.append(read_embeddings(returned)[0])
    images, texts = torch.stack(embeddings, dim=1)
    return about.load(images, texts, _scale(model))
