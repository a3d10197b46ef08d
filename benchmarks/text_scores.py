"""Compare ways to score training texts for questions from inner products of whole gradients.

Inner products are those of `projection: exact`, so they have no projection error. Their rows and
columns are the N texts of the planted facts: the training texts, then the questions with labels for
the answers only, then the questions with labels for all words.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import default_collate

from trak_core.attribution.project_gradients import Features
from trak_core.evaluation.baselines import bm25_scores
from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.settings import ProjectionKind, ProjectionSpec, matrix_shape
from trak_core.study.study import Study

_CHUNK, _SIDE = 64, 16
# Groups of parameters by substrings of their names. The first match counts.
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
    """Arrays computed with one checkpoint for all N rows.

    Attributes:
        groups: Inner products of the gradients of each group of parameters, shape (G, N, N).
        adam: Inner products of whole gradients divided by the root of Adam's second moments.
        sketches: S0^T G S1 of each matrix of attention and MLPs, shape (L, N, 256).
        projected: Features of the default kind for large models, k = 4,096.
        narrow: Features of a `rademacher` projection, k = 1,024.
        means: The hidden states of the last layer, averaged over words.
        ends: The hidden state of the last layer that predicts the last word.
        outputs: The model output f, shape (N,).
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
        """Return inner products summed over all groups, or those that start with ``names``."""
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
    """Return features of all samples of consecutive batches, shape (N, k)."""
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
        sums = Features(chosen, spec, len(part), threads=1)
        gradients_at_once(model, chosen, output, part, sums)
        rows.append(sums.scaled().numpy())
    return np.concatenate(rows)


def products(
    model: nn.Module, moments: dict[str, Tensor], rows: dict[str, Tensor], stream: int
) -> Products:
    """Compute all products of one model.

    Args:
        model: The model, whose mode is not changed.
        moments: Adam's bias-corrected second moments by parameter.
        rows: The batch that ``all_rows`` returns.
        stream: The number of the sketches' random stream, different for each checkpoint.
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
    """Return a training run's products at several times, from their file if it exists."""
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
    """Return seconds for gradients of the questions' answers, all words, and single words."""
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


TRAK = "TRAK, 2"  # and its damping


@dataclass(frozen=True)
class Scored:
    """Scores of every training text for every question, and the method to compare with."""

    way: str
    scores: np.ndarray
    baseline: str = TRAK


@dataclass(frozen=True)
class Way:
    """A method to compute scores from inner products.

    Attributes:
        damping: The damping relative to the mean squared norm; None for scores without an inverse.
        normalize: "": nothing. "before": training gradients have length 1, in the normal matrix
            too. "after": scores are divided by the training gradient's length. "inverse": scores
            are divided by sqrt(phi^T M^-1 phi). "both": scores are cosines.
        all_words: Whether all words of the questions are explained, instead of only the answer.
        is_unit_average: Whether each checkpoint's scores are divided by the norm of the training
            samples' scores.
    """

    damping: float | None = 2.0
    normalize: str = ""
    all_words: bool = False
    power: float = 0.75
    is_unit_average: bool = True

    def scores(self, kernel: np.ndarray, outputs: np.ndarray, n: int, m: int) -> np.ndarray:
        """Return one checkpoint's contribution to the scores, shape (n, m).

        Args:
            kernel: Inner products of all rows.
            outputs: f of all rows.
            n: The number of training texts.
            m: The number of questions.
        """
        first = n + m * self.all_words
        rows = np.r_[0:n, first : first + m]
        kernel, sizes = kernel[:n, rows].astype(float), np.sqrt(np.diagonal(kernel)[rows])
        if self.normalize in ("before", "both"):
            # The norm of a target's gradient does not change ranks within a checkpoint.
            kernel /= (
                sizes[:n, None]
                * np.r_[sizes[:n], sizes[n:] if self.normalize == "both" else np.ones(m)]
            )
        solved = kernel
        if self.damping is not None:
            own = kernel[:, :n]
            shift = self.damping * np.trace(own) / n
            solved = np.linalg.solve(own + shift * np.eye(n), kernel)
        weights = (1 / (1 + np.exp(outputs[:n]))) ** self.power
        if self.normalize == "after":
            weights = weights / sizes[:n]
        elif self.normalize == "inverse":
            weights = weights / np.sqrt(np.diagonal(solved))
        solved = weights[:, None] * solved
        norm = np.linalg.norm(solved[:, :n]) if self.is_unit_average else 1.0
        return solved[:, n:] / norm


_COSINE = Way(None, "both", power=0, is_unit_average=False)


def bm25(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return BM25's scores, shape (texts, questions)."""
    return np.stack(list(bm25_scores(texts, questions)), axis=1)


def tf_idf(texts: list[list[str]], questions: list[list[str]]) -> np.ndarray:
    """Return cosines of scikit-learn's TF-IDF, shape (texts, questions)."""
    joined = [" ".join(text) for text in texts]
    made = TfidfVectorizer(token_pattern=r"\S+").fit(joined)
    asked = made.transform([" ".join(question) for question in questions])
    return (made.transform(joined) @ asked.T).toarray()


def sketch_by_layer(sketches: np.ndarray, n: int, m: int, damping: float) -> np.ndarray:
    """Return sums over layers of phi_l^T (Phi_l^T Phi_l + lambda_l I)^-1 t_l, shape (n, m)."""
    total = np.zeros((n, m))
    for layer in sketches.astype(float):
        train, targets = layer[:n], layer[n : n + m]
        normal = train.T @ train
        shift = damping * np.trace(normal) / len(normal)
        total += train @ np.linalg.solve(normal + shift * np.eye(len(normal)), targets.T)
    return total


def side_by_side(sketches: np.ndarray) -> np.ndarray:
    """Return inner products of the rows' concatenated sketches of all layers."""
    return (sketches @ sketches.transpose(0, 2, 1)).sum(axis=0)


def cosines(rows: np.ndarray, n: int, m: int) -> np.ndarray:
    """Return the cosines between training texts and questions, shape (n, m)."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit[:n] @ unit[n : n + m].T


Share = Callable[[Products], np.ndarray]


def ways(study: Study, made: Mapping[tuple[int, int], Products]) -> list[Scored]:
    """Return the scores of all methods.

    Args:
        study: The planted facts.
        made: The products of each checkpoint, by seed and time.
    """
    texts = [study.module.words(text) for text in study.module.training_texts().values()]
    asked = [study.module.words(text) for text, _ in study.module.questions().values()]
    n, m = len(texts), len(asked)
    last = max(at for _, at in made)

    def mean(one: Share, *, ends: bool = False) -> np.ndarray:
        return np.mean([one(x) for (_, at), x in made.items() if at == last or not ends], axis=0)

    def exact(way: Way, *groups: str) -> Share:
        return lambda one: way.scores(one.whole(groups), one.outputs, n, m)

    def adam(way: Way) -> Share:
        return lambda one: way.scores(one.adam, one.outputs, n, m)

    def projected(way: Way) -> Share:
        return lambda one: way.scores(one.projected @ one.projected.T, one.outputs, n, m)

    def sketched(way: Way) -> Share:
        return lambda one: way.scores(side_by_side(one.sketches), one.outputs, n, m)

    def by_layer(damping: float) -> Share:
        return lambda one: sketch_by_layer(one.sketches, n, m, damping)

    sides = "LoGra 16 x 16"
    baselines = {
        TRAK: mean(exact(Way())),
        "TF-IDF": tf_idf(texts, asked),
        "BM25": bm25(texts, asked),
        "embedding cosine, mean": mean(lambda one: cosines(one.means, n, m), ends=True),
        "embedding cosine, before the answer": mean(lambda one: cosines(one.ends, n, m), ends=True),
        "gradient dot": mean(exact(Way(None, power=1, is_unit_average=False))),
        "gradient dot, unit average": mean(exact(Way(None))),
        "gradient cosine": mean(exact(_COSINE)),
        f"{sides}, an inverse a layer, 0.1": mean(by_layer(0.1)),
        f"{sides}, an inverse a layer, 0.001": mean(by_layer(0.001)),
        f"{sides}, one inverse, 2": mean(sketched(Way())),
        f"{sides}, one inverse, 0.1": mean(sketched(Way(0.1))),
        "tensor_sketch, k = 4,096": mean(projected(Way())),
        "ends of runs alone": mean(exact(Way()), ends=True),
    }
    found = [Scored(name, scores) for name, scores in baselines.items()]
    dampings = 10.0, 0.5, 0.1, 0.03, 0.01
    found += [Scored(f"TRAK, {damping:g}", mean(exact(Way(damping)))) for damping in dampings]
    for damping in (2.0, 0.1, 0.01):
        options = {
            "normalize before": exact(Way(damping, "before")),
            "normalize before, questions too": exact(Way(damping, "both")),
            "normalize after": exact(Way(damping, "after")),
            "normalize under the inverse": exact(Way(damping, "inverse")),
            "Adam": adam(Way(damping)),
            "Adam, normalize before": adam(Way(damping, "before")),
            "all but word embeddings": exact(
                Way(damping), "positions", "norms", "attention", "MLP"
            ),
            "word embeddings": exact(Way(damping), "words"),
            "attention": exact(Way(damping), "attention"),
            "MLPs": exact(Way(damping), "MLP"),
            "last block": exact(Way(damping), "attention 1", "MLP 1"),
            "all words of the question": exact(Way(damping, all_words=True)),
        }
        baseline = f"TRAK, {damping:g}"
        found += [
            Scored(f"{name}, {damping:g}", mean(one), baseline) for name, one in options.items()
        ]
    return [
        *found,
        Scored("Adam, no inverse", mean(adam(Way(None))), "gradient dot, unit average"),
        Scored("Adam, cosine", mean(adam(_COSINE)), "gradient cosine"),
    ]
