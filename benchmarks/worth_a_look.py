"""How many samples does `suspects` call worth a look, and how many of them have a wrong label?

    python benchmarks/worth_a_look.py --draws 10

Scikit-learn's digits: 700 for training, 300 held-out ones with right labels as targets. 1, 3, 10 or
20 % of the training labels are wrong: any other digit, or asymmetric, where threes, ones and eights
(these half as often) alone are called a digit that looks alike. Two trainings of a network of 32
units with two checkpoints each; scores by `unit_average` with damping 2 and power 0.5, in a few
lines of numpy here, with gradients of log-odds projected to 256 numbers.
"""

import argparse
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits

from trak_core.lists.lists import suspects

_N_TRAIN, _N_TARGETS, _UNITS, _K, _BATCH = 700, 300, 32, 256, 64
_STEPS, _AT, _RUNS, _RATE = 300, (60, 300), 2, 3e-3
_RATES = 0.01, 0.03, 0.1, 0.2
_LOOKS_LIKE = {3: 8, 8: 3, 1: 7}
Parameters = list[np.ndarray]
# Inputs and labels.
Samples = tuple[np.ndarray, np.ndarray]


def _forward(weights: Parameters, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return hidden units and probabilities."""
    hidden = np.maximum(x @ weights[0] + weights[1], 0)
    logits = hidden @ weights[2] + weights[3]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def _checkpoints(x: np.ndarray, y: np.ndarray, random: np.random.Generator) -> list[Parameters]:
    """Train by Adam."""
    weights = [
        random.standard_normal((x.shape[1], _UNITS)) * np.sqrt(2 / x.shape[1]),
        np.zeros(_UNITS),
        random.standard_normal((_UNITS, 10)) / np.sqrt(_UNITS),
        np.zeros(10),
    ]
    first, second = ([np.zeros_like(own) for own in weights] for _ in range(2))
    kept = []
    for step in range(1, _STEPS + 1):
        rows = random.integers(len(x), size=_BATCH)
        hidden, p = _forward(weights, x[rows])
        p[np.arange(_BATCH), y[rows]] -= 1
        p /= _BATCH
        back = (p @ weights[2].T) * (hidden > 0)
        slopes = [x[rows].T @ back, back.sum(axis=0), hidden.T @ p, p.sum(axis=0)]
        for i, slope in enumerate(slopes):
            first[i] = 0.9 * first[i] + 0.1 * slope
            second[i] = 0.999 * second[i] + 0.001 * slope**2
            size = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-8
            weights[i] = weights[i] - _RATE * first[i] / (1 - 0.9**step) / size
        if step in _AT:
            kept.append(list(weights))
    return kept


def _gradients(
    weights: Parameters, x: np.ndarray, y: np.ndarray, projection: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return projected gradients of log-odds, (n, k), and 1 - p, (n,)."""
    hidden, p = _forward(weights, x)
    rows = np.arange(len(x))
    left = np.maximum(1 - p[rows, y], 1e-7)
    slopes = -p / left[:, None]
    slopes[rows, y] = 1
    back = (slopes @ weights[2].T) * (hidden > 0)
    outer = [x[:, :, None] * back[:, None], hidden[:, :, None] * slopes[:, None]]
    of_inputs, of_units = (part.reshape(len(x), -1) for part in outer)
    return np.concatenate([of_inputs, back, of_units, slopes], axis=1) @ projection, left


def _scores(
    runs: list[Parameters], train: Samples, targets: Samples, signs: np.ndarray
) -> np.ndarray:
    """Return scores, (n, m)."""
    total = np.zeros((_N_TRAIN, _N_TARGETS))
    for weights in runs:
        phi, loss_weight = _gradients(weights, *train, signs)
        asked, _ = _gradients(weights, *targets, signs)
        curvature = loss_weight * (1 - loss_weight)
        normal = (phi * curvature[:, None]).T @ phi
        normal[np.diag_indices(_K)] += 2 * np.mean(curvature * (phi**2).sum(axis=1))
        root = np.sqrt(loss_weight)[:, None]
        solved = np.linalg.solve(normal, phi.T)
        total += root * (asked @ solved).T / np.linalg.norm(root * (phi @ solved))
    return total / len(runs)


def _draw(x: np.ndarray, y: np.ndarray, rate: float, kind: str, draw: int) -> tuple[int, int, int]:
    """Return how many labels are wrong, how many are worth a look, and how many are both."""
    random = np.random.default_rng([draw, int(100 * rate), kind == "asymmetric"])
    order = random.permutation(len(y))
    own, held = order[:_N_TRAIN], order[_N_TRAIN : _N_TRAIN + _N_TARGETS]
    given = y[own].copy()
    n_wrong = round(rate * _N_TRAIN)
    if kind == "asymmetric":
        often = np.isin(given, list(_LOOKS_LIKE)) * np.where(given == 8, 0.5, 1.0)
        wrong = random.choice(_N_TRAIN, n_wrong, replace=False, p=often / often.sum())
        given[wrong] = [_LOOKS_LIKE[label] for label in given[wrong]]
    else:
        wrong = np.sort(random.permutation(_N_TRAIN)[:n_wrong])
        given[wrong] = (given[wrong] + random.integers(1, 10, n_wrong)) % 10
    n_weights = x.shape[1] * _UNITS + _UNITS + _UNITS * 10 + 10
    signs = random.choice([-1.0, 1.0], size=(n_weights, _K)) / np.sqrt(_K)
    runs = [
        checkpoint
        for run in range(_RUNS)
        for checkpoint in _checkpoints(x[own], given, np.random.default_rng([draw, run]))
    ]
    scores = _scores(runs, (x[own], given), (x[held], y[held]), signs)
    help_, harm = (np.maximum(part, 0).mean(axis=1) for part in (scores, -scores))
    listed = suspects(pd.DataFrame({"id": range(_N_TRAIN), "help": help_, "harm": harm}))
    looked = set(listed.query("worth_a_look == 1")["id"])
    return len(wrong), len(looked), len(looked & {*wrong.tolist()})


def main() -> None:
    """Print a row for each rate and kind of wrong labels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    n_draws = parser.parse_args().draws
    digits: Any = load_digits()
    x, y = digits.data / 16, digits.target
    print(
        "| wrong labels | kind | worth a look, mean and range | of these wrong | "
        "of the wrong ones found | draws with fewer than are wrong |"
    )
    print("|---|---|---|---|---|---|")
    for rate in _RATES:
        for kind in ("any other", "asymmetric"):
            found = np.array([_draw(x, y, rate, kind, draw) for draw in range(n_draws)])
            wrong, looked, both = found.sum(axis=0)
            least, most = found[:, 1].min(), found[:, 1].max()
            n_fewer = np.count_nonzero(found[:, 1] < found[:, 0])
            print(
                f"| {wrong // n_draws} ({100 * rate:.0f} %) | {kind} | "
                f"{looked / n_draws:.0f} ({least} to {most}) | {100 * both / looked:.0f} % | "
                f"{100 * both / wrong:.0f} % | {n_fewer} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
