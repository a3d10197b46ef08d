"""Make the model output that a config names, under one checkpoint."""

from pathlib import Path

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import as_batch, call, in_evaluation_mode
from trak_core.model_outputs.clip import contrast, drawn_pairs, read_embeddings
from trak_core.model_outputs.language_modelling import warn_of_masked_model
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.own_output import own_output
from trak_core.model_outputs.table import TABLE, place_of
from trak_core.study.split import Split
from trak_core.study.study import Study

# Number of contrast pairs for CLIP (TRAK uses 300), and the seed of their draw.
N_OTHERS = 300
OTHERS_SEED = 0
# Reads pairs, which have no labels, before their embeddings are known.
_UNLABELLED = contrast(torch.zeros(0, 0), torch.zeros(0, 0), 1.0)


def _found_at(file: str, name: str, study: Study | None) -> object:
    """Return what a Python file, which may be the study's, has by a name."""
    path = Path(file)
    if study is None or path.resolve() != study.path.resolve():
        study = Study.load(path)
    module = study.module
    if not hasattr(module, name):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == path.stem]
        raise InputError(
            f"model_output must name a function or a ModelOutput in {file}. Found no {name} among "
            f"{', '.join(own) or 'no functions'}.",
            code="model_outputs.no_function",
        )
    return getattr(module, name)


def _scale(model: nn.Module) -> float:
    """Return the factor of a CLIP model's inner products."""
    scales = [p for name, p in model.named_parameters() if name.split(".")[-1] == "logit_scale"]
    if len(scales) != 1 or scales[0].numel() != 1:
        raise InputError(
            "model_output clip needs a model with one parameter `logit_scale`, the logarithm of "
            f"the factor of its inner products. Found {len(scales)}."
        )
    return scales[0].detach().exp().item()


def model_output(
    name: str,
    model: nn.Module,
    pairs: Split | None,
    device: torch.device,
    study: Study | None = None,
    n_others: int = N_OTHERS,
) -> ModelOutput:
    """Return the model output with a name of ``TABLE``, or in a Python file, ``file.py:name``.

    The file may be that of the ``study``, which isn't run again then. For an output that
    ``needs_pairs``, ``n_others`` contrast pairs are drawn uniformly from the training ``pairs``,
    the same for every checkpoint, and embedded under this checkpoint. The model must have a
    ``logit_scale``.
    """
    place = place_of(name)
    if place is not None:
        return own_output(_found_at(*place, study), name)
    about = TABLE[name]
    if not about.needs_pairs:
        output = about.load()
        warn_of_masked_model(output, model)
        return output
    assert pairs is not None
    embeddings: list[Tensor] = []
    with torch.no_grad(), in_evaluation_mode(model):
        for i in drawn_pairs(len(pairs.ids), n_others, OTHERS_SEED):
            pair = as_batch(pairs.batch(i, i + 1), _UNLABELLED)
            returned = call(model, pair.mapped(lambda tensor: tensor.to(device)))
            embeddings.append(read_embeddings(returned)[0])
    images, texts = torch.stack(embeddings, dim=1)
    return about.load(images, texts, _scale(model))
