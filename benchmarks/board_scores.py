"""Compute the board's scores by this package, by undamped TRAK, and by shared words.

Scores of this package use inner products of whole gradients, as `projection: exact` does, unless a
projection is named.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from board_study import TIMES, Board, losses, make_model, save, written
from text_scores import Way, bm25, cosines, features, tf_idf
from torch import Tensor, nn

from trak_core import Attributor
from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING, TOKEN_LOG_ODDS
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.settings import ProjectionKind

_CHUNK, _MOST_BYTES = 64, 1e9
_DAMPINGS = 2.0, 0.3, 0.1, 0.03, 0.01
OURS = "along a run, damping 0.1"
Products = Mapping[str, np.ndarray]


def loaded(about: Board, folder: Path, run: str, at: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a checkpoint's model and Adam's second moments."""
    kept = torch.load(folder / f"{run}.pt")[at]
    model = make_model(about.size).eval()
    model.load_state_dict(kept["state"], strict=False)  # the head shares the embeddings
    return model, kept["moments"]


def _parts(about: Board, output: ModelOutput) -> list[Any]:
    batch = as_batch({"input_ids": about.tokens, "labels": about.tokens}, output)
    return [batch.rows(slice(i, i + _CHUNK)) for i in range(0, len(batch), _CHUNK)]


def _groups(chosen: Mapping[str, nn.Parameter], n: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield groups of parameters whose gradients for all rows fit into memory."""
    group: dict[str, nn.Parameter] = {}
    for name, parameter in chosen.items():
        size = sum(p.numel() for p in [*group.values(), parameter])
        if group and 4 * n * size > _MOST_BYTES:
            yield group
            group = {}
        group[name] = parameter
    yield group


def _kernels(
    model: nn.Module, moments: Mapping[str, Tensor] | None, about: Board, output: ModelOutput
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inner products of all gradients, those with Adam's ``moments`` if given, and f.

    Rows and columns are all pieces.
    """
    n = len(about.tokens)
    plain, adam, outputs = np.zeros((n, n)), np.zeros((n, n)), np.zeros(n)
    parts = _parts(about, output)
    for group in _groups(select_parameters(model, None), n):
        formed = [formed_gradients(gradients_at_once, model, group, output, x) for x in parts]
        outputs = torch.cat([one.outputs for one in formed]).numpy()
        for name, blocks in zip(
            group, zip(*(x.blocks() for x in formed), strict=True), strict=True
        ):
            block = torch.cat(blocks)
            plain += (block @ block.T).numpy()
            if moments is not None:
                block /= moments[name].flatten().sqrt() + 1e-8
                adam += (block @ block.T).numpy()
    return plain, adam, outputs


def products_of(about: Board, folder: Path, run: str, at: float, k: int | None) -> Products:
    """Return one checkpoint's inner products for all pieces, read from their file if it exists.

    If ``k`` is given, only the features of a dense projection are returned.
    """
    path = folder / f"products-{run}-{at}.npz"
    if not path.exists():
        model, moments = loaded(about, folder, run, at)
        parts = _parts(about, LANGUAGE_MODELLING)
        stream = 100 * int(run.partition("-")[2]) + round(100 * at) + 10_000 * (k is not None)
        if k is not None:
            found = {"trak": features(model, parts, ProjectionKind.RADEMACHER, k, stream)}
            with torch.no_grad():
                found["outputs"] = -losses(model, about.tokens).numpy()
        else:
            plain, adam, outputs = _kernels(model, moments, about, LANGUAGE_MODELLING)
            by_tokens, _, token_outputs = _kernels(model, None, about, TOKEN_LOG_ODDS)
            with torch.no_grad():
                hidden = model(input_ids=about.tokens, output_hidden_states=True).hidden_states
            found = {
                "plain": plain,
                "adam": adam,
                "outputs": outputs,
                "by_tokens": by_tokens,
                "token_outputs": token_outputs,
                "means": hidden[-1].mean(dim=1).numpy(),
                "dense": features(model, parts, ProjectionKind.RADEMACHER, 1024, stream),
                "sketch": features(model, parts, ProjectionKind.TENSOR_SKETCH, 4096, stream),
            }
        written(path, lambda path: save(path, found))
    with np.load(path) as file:
        return dict(file)


Share = Callable[[Products], np.ndarray]


def of_ends(made: list[Products], n: int, damping: float) -> np.ndarray:
    """Return TRAK's scores by the formula of its paper, plus a damping, shape (n, m)."""
    shares = []
    for one in made:
        phi, targets = one["trak"][:n].astype(float), one["trak"][n:].astype(float)
        normal = phi.T @ phi
        shift = damping * np.trace(normal) / n
        shares.append(phi @ np.linalg.solve(normal + shift * np.eye(len(normal)), targets.T))
    # 1 - p, where p is the probability of a whole text, so this is nearly 1.
    weights = np.mean([-np.expm1(one["outputs"][:n].astype(float)) for one in made], axis=0)
    return weights[:, None] * np.mean(shares, axis=0)


def all_scores(about: Board, folder: Path) -> dict[str, np.ndarray]:
    """Return scores by the names of their rows, each of shape (n, m)."""
    n, m = about.size.texts, about.size.questions
    runs = [f"run-{i}" for i in range(about.size.runs) if (folder / f"run-{i}.pt").exists()]
    made = {(run, at): products_of(about, folder, run, at, None) for run in runs for at in TIMES}
    first = {at: made["run-0", at] for at in TIMES}

    def of(way: Way, what: str = "plain", outputs: str = "outputs") -> Share:
        def share(one: Products) -> np.ndarray:
            kernel = one[what] if one[what].shape[1] == n + m else one[what] @ one[what].T
            return way.scores(kernel, one[outputs], n, m)

        return share

    def along(share: Share) -> np.ndarray:
        return np.mean([share(one) for one in first.values()], axis=0)

    k = round(0.89 * n)
    halves = [f"half-{i}" for i in range(about.size.halves)]
    ends = [products_of(about, folder, run, 1.0, k) for run in halves]
    end = first[1.0]
    cosine = Way(None, "both", power=0, is_unit_average=False)
    found = {}
    for damping in _DAMPINGS:
        way = Way(damping)
        found[f"along a run, damping {damping:g}"] = along(of(way))
        found[f"its end, damping {damping:g}"] = of(way)(end)
        name = f"damping {damping:g}"
        found[f"along, token_log_odds, {name}"] = along(of(way, "by_tokens", "token_outputs"))
        found[f"along, unit length, {name}"] = along(of(Way(damping, "before")))
        found[f"along, Adam, {name}"] = along(of(way, "adam"))
        found[f"along, Adam, unit length, {name}"] = along(of(Way(damping, "before"), "adam"))
        found[f"along, rademacher, k = 1,024, {name}"] = along(of(way, "dense"))
        found[f"along, tensor_sketch, k = 4,096, {name}"] = along(of(way, "sketch"))
        if len(runs) > 1:
            every = [of(way)(one) for one in made.values()]
            found[f"along {len(runs)} runs, {name}"] = np.mean(every, axis=0)
        if ends:
            found[f"ends on 8 halves, k = {k}, {name}"] = of_ends(ends, n, damping)
    if ends:
        name = f"TRAK as the board runs it: ends on 8 halves, k = {k}, no damping"
        found[name] = of_ends(ends, n, 0)
    found |= {
        "gradient dot, the end": of(Way(None, power=1, is_unit_average=False))(end),
        "gradient dot, along": along(of(Way(None))),
        "gradient cosine, the end": of(cosine)(end),
        "gradient cosine, along": along(of(cosine)),
    }
    texts, asked = about.pieces[:n], about.pieces[n:]
    found |= {"BM25": bm25(texts, asked), "TF-IDF": tf_idf(texts, asked)}
    return found | {"embedding cosine, the end": cosines(end["means"], n, m)}


def drawn_scores(
    about: Board, folder: Path, draws: Sequence[int], dampings: Sequence[float]
) -> dict[str, np.ndarray]:
    """Return `Attributor`'s scores (n, m) with ``label_draws``, from a run's end and along the run.

    Features are from a `rademacher` projection with k = 1,024. For the end of the run, exact scores
    are also computed. The CPU seconds of `fit`, and of `score` per question, are printed.
    """
    train, asked = (
        [{"input_ids": one, "labels": one} for one in pieces]
        for pieces in (about.train, about.asked)
    )
    states = {at: loaded(about, folder, "run-0", at)[0].state_dict() for at in TIMES}
    named = {f"at{at:g}": {"path": state, "run": "run", "at": at} for at, state in states.items()}
    projected: dict[str, Any] = {"kind": "rademacher"}
    rows = {
        "its end, k = 1,024": (states[1.0], projected),
        "along, k = 1,024": (named, projected),
        "its end": (states[1.0], {"projection": "exact", "memory_mb": 6000}),
    }
    scores = {}
    for number, (name, (kept, settings)) in product(draws, rows.items()):
        made = folder / f"drawn-{number}-{name.replace(' ', '-')}"
        for damping in dampings:
            attributor = Attributor(
                partial(make_model, about.size),
                "language_modelling",
                kept,
                label_draws=number,
                damping=damping,
                threads=1,
                **settings,
            )
            began = time.process_time()
            attributor.fit(train, made)
            fitted = time.process_time()
            row = f"{name}, {number} drawn labels, damping {damping:g}"
            scores[row] = attributor.score(asked).frame.to_numpy()
            each = (time.process_time() - fitted) / len(asked)
            print(f"{row}: {fitted - began:.1f} s, {each:.2f} s a question")
    return scores
