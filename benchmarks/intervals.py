"""Do the intervals hold what they promise? Simulated experiments whose truth is known.

    python benchmarks/intervals.py --experiments 200

Means: numbers of trainings and targets, shifted by each training, each target, and both at once, by
normal or by exponential (lopsided) amounts. Accuracies: five models that know all targets but a few
hard ones, which each of them gets right every other time. Groups: samples' scores around one
number, shifted by each run. LDS: sums and outputs from normal distributions, which half of their
variance shares over targets, so that the true rank correlations are known; outputs of two trainings
or more. Printed is the part of experiments whose 95 % interval held the truth; for groups and means
also that of plain percentiles of a bootstrap, for accuracies that of the interval of other means.
"""

import argparse
from collections.abc import Callable

import numpy as np

from trak_core.evaluation.intervals import accuracy_interval, interval, mean_interval
from trak_core.evaluation.lds import bootstrap, noise_ceiling
from trak_core.lists.groups import GroupSums, chance_of_samples, group_interval, run_weights
from trak_core.spec import Combine

Draw = Callable[..., np.ndarray]
# Trainings, targets, and the sizes of what each training, each target and each pair does.
_MEANS = [
    *((2, 100, (1, 0, 0)), (3, 100, (0.3, 1, 1)), (5, 100, (1, 0, 0)), (5, 100, (0.3, 1, 1))),
    *((5, 100, (0, 1, 0)), (5, 5, (1, 1, 1)), (10, 100, (0.3, 1, 1)), (2, 100, (0.3, 1, 1))),
]
_ACCURACIES = 0.9, 0.97, 0.99, 0.997
# Runs, samples, and the size of what a run does.
_GROUPS = [(1, 3, 0), (1, 5, 0), (1, 40, 0), (2, 40, 0.3), (3, 40, 0.3), (5, 40, 1), (10, 8, 0.3)]
# Subsets, targets, trainings, and how large their noise is beside what they share.
_LDS = [(20, 20, 2, 1), (40, 4, 2, 1), (40, 20, 2, 1), (40, 20, 2, 3), (40, 20, 5, 1)]
_LDS += [(100, 20, 2, 1)]
# Experiments of groups that have the same draws of samples; others have others.
_SAME_DRAWS = 10
_QUALITY, _SPREAD, _SHARED, _DRAWS = 0.6, 0.3, 0.5, 200


def _percentiles(values: np.ndarray, random: np.random.Generator) -> tuple[float, float]:
    """Return what a bootstrap of trainings and targets gives."""
    rows, columns = (random.integers(n, size=(_DRAWS, n)) for n in values.shape)
    drawn = values[rows[:, :, None], columns[:, None, :]].mean(axis=(1, 2))
    low, high = interval(drawn, axis=0)
    return float(low), float(high)


def _means(n_experiments: int) -> None:
    random = np.random.default_rng(5)
    kinds: dict[str, Draw] = {
        "normal": random.standard_normal,
        "lopsided": lambda shape: random.standard_exponential(shape) - 1,
    }
    print("| means: trainings, targets | sizes | kind | held | by percentiles |")
    print("|---|---|---|---|---|")
    for seeds, targets, sizes in _MEANS:
        shapes = (seeds, 1), (1, targets), (seeds, targets)
        for kind, draw in kinds.items():
            held = np.zeros(2)
            for _ in range(n_experiments):
                values = np.zeros((seeds, targets))
                for size, shape in zip(sizes, shapes, strict=True):
                    values = values + size * draw(shape)
                ends = mean_interval(values), _percentiles(values, random)
                held += [low <= 0 <= high for low, high in ends]
            own, plain = held / n_experiments
            print(
                f"| {seeds}, {targets} | {sizes} | {kind} | {own:.3f} | {plain:.3f} |", flush=True
            )


def _accuracies(n_experiments: int) -> None:
    random = np.random.default_rng(3)
    print("| accuracy | targets | held | as any mean |\n|---|---|---|---|")
    for accuracy in _ACCURACIES:
        for targets in (20, 50, 200):
            held = np.zeros(2)
            for _ in range(n_experiments):
                is_hard = random.random(targets) < 2 * (1 - accuracy)
                right = np.where(is_hard, random.random((5, targets)) < 0.5, 1.0)
                ends = accuracy_interval(right), mean_interval(right)
                held += [low <= accuracy <= high for low, high in ends]
            own, plain = held / n_experiments
            print(f"| {accuracy} | {targets} | {own:.3f} | {plain:.3f} |", flush=True)


def _groups(n_experiments: int) -> None:
    random = np.random.default_rng(11)
    print("| groups: runs, samples | size | held | by percentiles |\n|---|---|---|---|")
    for runs, n, size in _GROUPS:
        weights, held = run_weights(range(runs)), np.zeros(2)
        n_parts = max(1, n_experiments // _SAME_DRAWS)
        for part in range(n_parts):
            values = random.standard_normal((1, n, _SAME_DRAWS))
            values = values + size * random.standard_normal((runs, 1, _SAME_DRAWS))
            sums = GroupSums(1, _SAME_DRAWS, Combine.AVERAGE_OF_PRODUCTS, weights)
            sums.random = np.random.default_rng([1, part])
            sums.add(values, np.ones((runs, n)), [1.0] * runs, [np.zeros(n, int)])
            draws = sums.drawn_means()[0].T
            chance = chance_of_samples(draws, n)
            own = group_interval(draws, sums.plain[0] / n, chance, runs)
            for i, (low, high) in enumerate([own, interval(draws, axis=-1)]):
                held[i] += ((low <= 0) & (high >= 0)).mean()
        own, plain = held / n_parts
        print(f"| {runs}, {n} | {size} | {own:.3f} | {plain:.3f} |", flush=True)


def _shared(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return normal numbers of which targets, the last axis, share a part."""
    common = random.standard_normal((*shape[:-1], 1))
    return np.sqrt(_SHARED) * common + np.sqrt(1 - _SHARED) * random.standard_normal(shape)


def _spearman(pearson: np.ndarray) -> np.ndarray:
    """Return the rank correlation of normal numbers with a correlation."""
    return 6 / np.pi * np.arcsin(pearson / 2)


def _lds(n_experiments: int) -> None:
    random = np.random.default_rng(7)
    print(
        "| LDS: subsets, targets, trainings | noise | LDS | paired | ceiling | it is too low by |"
    )
    print("|---|---|---|---|---|---|")
    for subsets, targets, trainings, noise in _LDS:
        many = np.clip(_QUALITY + _SPREAD * random.standard_normal(10**6), -0.95, 0.95)
        reached = 1 / np.sqrt(1 + noise**2 / trainings)
        true = np.array([_spearman(q * reached).mean() for q in (many, 0.8 * many)])
        top = float(_spearman(np.array(reached)))
        held, low_by = np.zeros(3), []
        for experiment in range(n_experiments):
            q = np.clip(_QUALITY + _SPREAD * random.standard_normal(targets), -0.95, 0.95)
            signal = _shared((subsets, targets), random)
            sums = [
                part * signal + np.sqrt(1 - part**2) * _shared(signal.shape, random)
                for part in (q, 0.8 * q)
            ]
            outputs = signal + noise * _shared((trainings, *signal.shape), random)
            drawn = bootstrap(sums, outputs, n_draws=_DRAWS, seed=experiment)
            columns = np.stack([drawn[:, 0], drawn[:, 0] - drawn[:, 1], drawn[:, 2]], axis=1)
            low, high = interval(columns, axis=0)
            truth = np.array([true[0], true[0] - true[1], top])
            held += (low <= truth) & (truth <= high)
            low_by.append(top - noise_ceiling(outputs).mean())
        cells = " | ".join(f"{part:.3f}" for part in held / n_experiments)
        about = f"| {subsets}, {targets}, {trainings} | {noise} | {cells}"
        print(f"{about} | {np.mean(low_by):.3f} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1000)
    n_experiments = parser.parse_args().experiments
    _means(n_experiments)
    _accuracies(n_experiments)
    _groups(n_experiments)
    _lds(n_experiments)


if __name__ == "__main__":
    main()
