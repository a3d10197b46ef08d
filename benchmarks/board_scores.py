"""Compute the board's scores by this package, by undamped TRAK, and by shared words.

Scores of this package use inner products of whole gradients, as `projection: exact` does, unless a
projection is named.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from board_study import TIMES, Board, losses, make_model, save, written
from text_scores import Way, bm25, cosines, tf_idf
from torch import Tensor, nn

from trak_core import Attributor
from trak_core.attribution.project_gradients import Features
from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.settings import ProjectionKind, ProjectionSpec

_CHUNK, _MOST_BYTES = 64, 1e9
_DAMPINGS = 2.0, 0.3, 0.1, 0.03
OURS = "along a run, damping 0.1"
Products = Mapping[str, np.ndarray]


def loaded(about: Board, folder: Path, run: str, at: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a checkpoint's model and Adam's second moments."""
    kept = torch.load(folder / f"{run}.pt")[at]
    model = make_model(about.size).eval()
    model.load_state_dict(kept["state"], strict=False)  # the head shares the embeddings
    return model, kept["moments"]


def _parts(about: Board) -> list[Any]:
    tokens = {"input_ids": about.tokens, "labels": about.tokens}
    batch = as_batch(tokens, LANGUAGE_MODELLING)
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


def _kernels(about: Board, folder: Path, run: str, at: float) -> Products:
    """Return inner products of all pieces' gradients, without and with Adam's moments, and f."""
    n = len(about.tokens)
    model, moments = loaded(about, folder, run, at)
    plain, adam, outputs = np.zeros((n, n)), np.zeros((n, n)), np.zeros(n)
    parts = _parts(about)
    for group in _groups(select_parameters(model, None), n):
        what = model, group, LANGUAGE_MODELLING
        formed = [formed_gradients(gradients_at_once, *what, part) for part in parts]
        outputs = torch.cat([one.outputs for one in formed]).numpy()
        all_blocks = zip(*(x.blocks() for x in formed), strict=True)
        for name, blocks in zip(group, all_blocks, strict=True):
            block = torch.cat(blocks)
            plain += (block @ block.T).numpy()
            block /= moments[name].flatten().sqrt() + 1e-8
            adam += (block @ block.T).numpy()
    return {"plain": plain, "adam": adam, "outputs": outputs}


def _features(about: Board, folder: Path, run: str, k: int) -> Products:
    """Return the features of the end of a run by a dense projection to k numbers, and log p."""
    model, _ = loaded(about, folder, run, 1.0)
    chosen = select_parameters(model, None)
    spec = ProjectionSpec(
        kind=ProjectionKind.RADEMACHER,
        n_params=sum(p.numel() for p in chosen.values()),
        proj_dim=k,
        seed=0,
        stream=100 * int(run.partition("-")[2]) + 10_100,
    )
    rows = []
    for part in _parts(about):
        sums = Features(chosen, spec, len(part), threads=1)
        gradients_at_once(model, chosen, LANGUAGE_MODELLING, part, sums)
        rows.append(sums.scaled().numpy())
    with torch.no_grad():
        outputs = -losses(model, about.tokens).numpy()
    return {"features": np.concatenate(rows), "outputs": outputs}


def _kept(path: Path, compute: Callable[[], Products]) -> Products:
    """Return arrays from their file, which is written if it does not exist."""
    if not path.exists():
        made = compute()
        written(path, lambda path: save(path, made))
    with np.load(path) as file:
        return dict(file)


def of_ends(made: list[Products], n: int) -> np.ndarray:
    """Return TRAK's scores by the formula of its paper, without damping, shape (n, m)."""
    shares = []
    for one in made:
        phi, targets = one["features"][:n].astype(float), one["features"][n:].astype(float)
        shares.append(phi @ np.linalg.solve(phi.T @ phi, targets.T))
    # 1 - p, where p is the probability of a whole text, so this is nearly 1.
    weights = np.mean([-np.expm1(one["outputs"][:n].astype(float)) for one in made], axis=0)
    return weights[:, None] * np.mean(shares, axis=0)


def all_scores(about: Board, folder: Path) -> dict[str, np.ndarray]:
    """Return scores by the names of their rows, each of shape (n, m)."""
    n = about.size.texts
    runs = [f"run-{i}" for i in range(about.size.runs) if (folder / f"run-{i}.pt").exists()]
    made = {
        (run, at): _kept(
            folder / f"products-{run}-{at}.npz", partial(_kernels, about, folder, run, at)
        )
        for run, at in product(runs, TIMES)
    }
    first = [made["run-0", at] for at in TIMES]

    def mean(way: Way, chosen: Iterable[Products], kind: str = "plain") -> np.ndarray:
        return np.mean([way.scores(one[kind], one["outputs"], n) for one in chosen], axis=0)

    found = {}
    for damping in _DAMPINGS:
        way, name = Way(damping), f"damping {damping:g}"
        found[f"along a run, {name}"] = mean(way, first)
        found[f"along, unit length, {name}"] = mean(Way(damping, normalize=True), first)
        found[f"along, Adam, {name}"] = mean(way, first, "adam")
        found[f"its end, {name}"] = mean(way, first[-1:])
        if len(runs) > 1:
            found[f"along {len(runs)} runs, {name}"] = mean(way, made.values())
    if about.size.halves:
        k = round(0.89 * n)
        ends = [
            _kept(
                folder / f"features-half-{i}.npz", partial(_features, about, folder, f"half-{i}", k)
            )
            for i in range(about.size.halves)
        ]
        name = f"TRAK as the board runs it: ends on {len(ends)} halves, k = {k}, no damping"
        found[name] = of_ends(ends, n)
    dot = Way(None, power=1, is_unit_average=False)
    found |= {
        "gradient dot, the end": mean(dot, first[-1:]),
        "gradient dot, along": mean(Way(None), first),
        "gradient cosine, the end": cosines(first[-1]["plain"], n),
        "gradient cosine, along": np.mean([cosines(one["plain"], n) for one in first], axis=0),
    }
    texts, asked = about.pieces[:n], about.pieces[n:]
    return found | {"BM25": bm25(texts, asked), "TF-IDF": tf_idf(texts, asked)}


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
