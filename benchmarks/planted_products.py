"""Inner products of gradients of the planted facts' texts, some ways, and scores made of them.

Everything here goes by inner products of whole gradients, as `projection: exact` does, so that ways
to score are compared without a projection's chance errors. Rows and columns are the training texts,
then the questions with their answers counted alone, then the questions with all words counted.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import default_collate

from trak_core.attribution.project_gradients import Features
from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.spec import ProjectionKind, ProjectionSpec, matrix_shape
from trak_core.study.study import Study

_CHUNK, _SIDE = 64, 16
# Parameters that belong together, by what their names have in them; the first that fits.
_GROUPS = {
    "words": "wte",
    "positions": "wpe",
    "norms": "ln_",
    "attention 0": "h.0.attn",
    "attention 1": "h.1.attn",
    "MLP 0": "h.0.mlp",
    "MLP 1": "h.1.mlp",
}


@dataclass(frozen=True)
class Products:
    """What one checkpoint makes of all rows; every array but ``outputs`` has N rows.

    Attributes:
        groups: Inner products of the gradients of each group of parameters, shape (G, N, N).
        adam: Inner products of whole gradients divided by the root of Adam's second moments.
        sketches: S0^T G S1 of each matrix of attention and MLPs, shape (L, N, 256).
        projected: Features of the kind that large models get, k = 4,096.
        narrow: Those of random signs, k = 1,024.
        means: The last hidden states, averaged over words.
        ends: The last hidden state that predicts the last word.
        outputs: f, shape (N,).
    """

    groups: np.ndarray
    adam: np.ndarray
    sketches: np.ndarray
    projected: np.ndarray
    narrow: np.ndarray
    means: np.ndarray
    ends: np.ndarray
    outputs: np.ndarray

    def whole(self, names: tuple[str, ...] = ()) -> np.ndarray:
        """Return the inner products of all groups, or of those whose names begin so."""
        chosen = [i for i, name in enumerate(_GROUPS) if not names or name.startswith(names)]
        return self.groups[chosen].sum(axis=0)


def all_rows(study: Study) -> tuple[dict[str, Tensor], int, int]:
    """Return all rows as one batch, and how many training texts and questions there are."""
    module = study.module
    train, answers = module.train_data(), module.target_data()
    whole = module.Texts([text for text, _ in module.questions().values()])
    texts = [split[i] for split in (train, answers, whole) for i in range(len(split))]
    return default_collate(texts), len(train), len(answers)


def features(
    model: nn.Module,
    parts: list[Any],
    kind: ProjectionKind,
    k: int,
    stream: int,
    output: ModelOutput = LANGUAGE_MODELLING,
) -> np.ndarray:
    """Return features of batches of samples, one after the other, shape (N, k)."""
    chosen = select_parameters(model, None)
    shapes = [matrix_shape(p.shape) for p in chosen.values()]
    n_params = sum(p.numel() for p in chosen.values())
    is_sketch = kind is ProjectionKind.TENSOR_SKETCH
    spec = ProjectionSpec(
        kind=kind,
        n_params=n_params,
        proj_dim=k,
        seed=0,
        stream=stream,
        shapes=shapes if is_sketch else None,
    )
    rows = []
    for part in parts:
        sums = Features.zeros(chosen, spec, len(part), threads=1)
        gradients_at_once(model, chosen, output, part, sums)
        rows.append(sums.scaled().numpy())
    return np.concatenate(rows)


def products(
    model: nn.Module, moments: dict[str, Tensor], rows: dict[str, Tensor], stream: int
) -> Products:
    """Compute everything of one model.

    Args:
        model: In any mode, which is kept.
        moments: Adam's second moments by parameter, without their bias.
        rows: From ``all_rows``.
        stream: Every checkpoint's sketches have their own.
    """
    chosen = select_parameters(model, None)
    batch = as_batch(rows, LANGUAGE_MODELLING)
    parts = [batch.rows(slice(i, i + _CHUNK)) for i in range(0, len(batch), _CHUNK)]
    what = model, chosen, LANGUAGE_MODELLING
    formed = [formed_gradients(gradients_at_once, *what, part) for part in parts]
    n = len(batch)
    groups, adam = np.zeros((len(_GROUPS), n, n)), np.zeros((n, n))
    sketches = []
    rng = np.random.default_rng(stream)
    pairs = zip(*(one.blocks() for one in formed), strict=True)
    for (name, parameter), blocks in zip(chosen.items(), pairs, strict=True):
        block = torch.cat(blocks)
        group = next(i for i, part in enumerate(_GROUPS.values()) if part in name)
        groups[group] += (block @ block.T).numpy()
        if parameter.ndim == 2 and ".h." in name:
            shape = tuple(parameter.shape)
            s0, s1 = (
                torch.tensor(rng.choice([-1.0, 1.0], (side, _SIDE)) / _SIDE**0.5).float()
                for side in shape
            )
            sketches.append((s0.T @ block.reshape(n, *shape) @ s1).reshape(n, -1).numpy())
        block /= moments[name].flatten().sqrt() + 1e-8
        adam += (block @ block.T).numpy()
    with torch.no_grad():
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask")}
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
    mask = inputs["attention_mask"][..., None]
    lengths = mask.sum(dim=1)
    return Products(
        groups,
        adam,
        np.stack(sketches),
        features(model, parts, ProjectionKind.TENSOR_SKETCH, 4096, stream),
        features(model, parts, ProjectionKind.RADEMACHER, 1024, stream),
        ((hidden * mask).sum(dim=1) / lengths).numpy(),
        hidden[torch.arange(n), lengths[:, 0] - 2].numpy(),
        torch.cat([one.outputs for one in formed]).numpy(),
    )


def along(study: Study, seed: int, times: tuple[int, ...], folder: Path) -> list[Products]:
    """Train once, or read what was kept, and return what the models at some times make of all."""
    paths = [folder / f"{seed}-{at}.npz" for at in times]
    if not all(path.exists() for path in paths):
        rows = all_rows(study)[0]
        optimizers: list[torch.optim.Optimizer] = []
        hook = register_optimizer_step_post_hook(lambda one, *_: optimizers.append(one))
        for at, model in study.module.train(seed=seed, epochs=times[-1]):
            if at in times:
                state = {name: optimizers[-1].state[p] for name, p in model.named_parameters()}
                moments = {
                    name: one["exp_avg_sq"] / (1 - 0.999 ** float(one["step"]))
                    for name, one in state.items()
                }
                made = products(model, moments, rows, 100 * seed + at)
                np.savez(folder / f"{seed}-{at}.npz", **vars(made))
            optimizers.clear()
        hook.remove()
    return [Products(**np.load(path)) for path in paths]


def seconds_by_words(study: Study) -> dict[str, float]:
    """Return what gradients of the questions take: answers, all words, and each word by itself."""
    torch.manual_seed(0)
    model = study.make_model()
    rows, n, m = all_rows(study)
    chosen = select_parameters(model, None)
    splits = {"answers": slice(n, n + m), "all words": slice(n + m, n + 2 * m)}
    batches = {name: {k: v[which] for k, v in rows.items()} for name, which in splits.items()}
    whole = batches["all words"]
    places = (whole["labels"][:, 1:] != -100).nonzero()
    each = {name: tensor[places[:, 0]] for name, tensor in whole.items()}
    alone = torch.arange(whole["labels"].shape[1]) == places[:, 1:] + 1
    batches["each word"] = each | {"labels": each["labels"].masked_fill(~alone, -100)}
    found = {}
    for name, samples in batches.items():
        batch = as_batch(samples, LANGUAGE_MODELLING)
        start = time.process_time()
        for i in range(0, len(batch), _CHUNK):
            part = batch.rows(slice(i, i + _CHUNK))
            formed_gradients(gradients_at_once, model, chosen, LANGUAGE_MODELLING, part)
        found[f"{name} ({len(batch)} gradients)"] = time.process_time() - start
    return found
