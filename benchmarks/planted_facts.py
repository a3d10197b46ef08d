"""Compare scoring options by the ranks of the texts that state planted facts, and by LDS.

    python benchmarks/planted_facts.py --csv planted_facts.csv

The study is config/facts.py. There are three questions for each planted fact: a near copy, another
wording, and a question whose answer has another name. Three GPT-2s are trained on everything, three
without the planted texts, and two on each of some random halves, drawn as the pipeline does. Ranks
are those of the planted texts among all training texts. Intervals are 95 % bootstrap intervals over
the facts, and for the LDS over halves and questions. Differences are paired. Numbers in the names
of rows are dampings. --folder keeps the trained models for a second start.
"""

import argparse
import tempfile
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import environment, write_csv
from text_scores import Scored, along, seconds_by_words, ways
from torch.utils.data import Subset

from trak_core.attribution.sample_outputs import outputs_and_predictions
from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import GroundTruth, bootstrap, rank_correlations
from trak_core.settings import RetrainedSpec
from trak_core.stages.evaluate_scores import read_ground_truth
from trak_core.stages.retrain import retrain
from trak_core.study.study import Study

STUDY = Path(__file__).parents[1] / "config/facts.py"
_EPOCHS, _TIMES, _RUNS, _BLOCK, _DRAWS = 25, (10, 15, 20, 25), 3, 10, 1000
_KINDS = "copy", "reworded", "renamed"
_OUTPUT = "language_modelling"
_DATA = "all texts", "all but the planted ones"


@dataclass(frozen=True)
class Row:
    """Mean reciprocal ranks, recall at 10, median ranks and LDS of one method."""

    way: str
    copy: float
    reworded: float
    renamed: float
    mrr: float
    mrr_low: float
    mrr_high: float
    found_in_10: float
    median_copy: float
    median_reworded: float
    median_renamed: float
    lds: float
    lds_low: float
    lds_high: float
    baseline: str
    mrr_more: float
    mrr_more_low: float
    mrr_more_high: float
    lds_more: float
    lds_more_low: float
    lds_more_high: float


def planted_ranks(scores: np.ndarray, planted: list[list[int]]) -> np.ndarray:
    """Return the ranks of each question's planted texts among all texts, from 1 for the best.

    Texts with equal scores get the mean of their ranks.
    """
    found = []
    for column, own in zip(scores.T, planted, strict=True):
        others = np.delete(column, own)
        above = [(others > column[i]).sum() + (others == column[i]).sum() / 2 for i in own]
        found.append(sorted(1 + one for one in above))
    return np.array(found)


def learned(study: Study, folder: Path) -> dict[str, np.ndarray]:
    """Return losses of answers in nats, (runs, questions), with and without planted texts."""
    path = folder / "losses.npy"
    if not path.exists():
        train, pool = study.split("train", None), study.split("questions", None)
        planted = {text for _, own in study.module.questions().values() for text in own}
        kept = [i for i, name in enumerate(train.ids) if name not in planted]
        without = Subset(study.module.train_data(), kept)
        losses = []
        for data, seed in product((None, without), range(_RUNS)):
            *_, (_, model) = study.module.train(seed=seed, epochs=_EPOCHS, data=data)
            # For one token f is its log-odds: -log p = log(1 + exp(-f)).
            values = outputs_and_predictions(model, _OUTPUT, train, pool, 400)[0]
            losses.append(np.logaddexp(0, -values))
        np.save(path, np.reshape(losses, (len(_DATA), _RUNS, -1)))
    return dict(zip(_DATA, np.load(path), strict=True))


def retrained(study: Study, halves: int, folder: Path) -> GroundTruth:
    """Train two models on each random half, and write a file for every ten halves."""
    spec = RetrainedSpec(
        subsets="random",
        arguments={"epochs": _EPOCHS},
        model_output=_OUTPUT,
        study_digest="",
        seeds=2,
        seed=0,
    )
    paths = {first: folder / f"halves-{first}.h5" for first in range(0, halves, _BLOCK)}
    for first, path in paths.items():
        if not path.exists():
            retrain(
                retrained=path,
                study_file=STUDY,
                spec=spec,
                first=first,
                last=first + _BLOCK - 1,
                code="",
                batch_size=400,
                threads=1,
            )
    ids = study.module.train_ids(), study.module.target_ids()
    return read_ground_truth([*paths.values()], *ids, spec)


def table(study: Study, scored: list[Scored], truth: GroundTruth) -> tuple[list[Row], np.ndarray]:
    """Return the rows, and the interval of the noise ceiling."""
    module = study.module
    position = {name: i for i, name in enumerate(module.train_ids())}
    planted = [[position[one] for one in own] for _, own in module.questions().values()]
    # The three questions of a fact are consecutive; the bootstrap draws facts.
    ranks = np.stack([planted_ranks(one.scores, planted) for one in scored])
    ranks = ranks.reshape(len(scored), -1, len(_KINDS), 2)
    reciprocal = 1 / ranks[..., 0]
    rng = np.random.default_rng(0)
    n_facts = ranks.shape[1]
    drawn = np.stack([
        reciprocal[:, rng.integers(n_facts, size=n_facts)].mean(axis=(1, 2)) for _ in range(_DRAWS)
    ])
    sums = [truth.masks @ one.scores for one in scored]
    mean = truth.outputs.mean(axis=0)
    lds = np.array([rank_correlations(one, mean).mean() for one in sums])
    lds_drawn = bootstrap(sums, truth.outputs, n_draws=_DRAWS)
    names, names_of_cells = [one.way for one in scored], [field.name for field in fields(Row)]
    rows = []
    for i, one in enumerate(scored):
        other = names.index(one.baseline)
        values = [
            *reciprocal[i].mean(axis=0),
            reciprocal[i].mean(),
            *np.transpose(interval(drawn[:, [i]], axis=0))[0],
            (ranks[i] <= 10).mean(),
            *np.median(ranks[i], axis=(0, 2)),
            lds[i],
            *np.transpose(interval(lds_drawn[:, [i]], axis=0))[0],
        ]
        more = [
            reciprocal[i].mean() - reciprocal[other].mean(),
            *np.transpose(interval(drawn[:, [i]] - drawn[:, [other]], axis=0))[0],
            lds[i] - lds[other],
            *np.transpose(interval(lds_drawn[:, [i]] - lds_drawn[:, [other]], axis=0))[0],
        ]
        first, second = ([round(float(x), 4) for x in part] for part in (values, more))
        cells: list[Any] = [one.way, *first, one.baseline, *second]
        rows.append(Row(**dict(zip(names_of_cells, cells, strict=True))))
    return rows, np.transpose(interval(lds_drawn, axis=0))[-1]


def main() -> None:
    """Train, score, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--halves", type=int, default=40, help="a multiple of ten")
    parser.add_argument("--folder", type=Path, help="keeps what was trained")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(exist_ok=True)
        study = Study.load(STUDY)
        losses = learned(study, folder)
        made = {
            (seed, at): found
            for seed in range(_RUNS)
            for at, found in zip(_TIMES, along(study, seed, _TIMES, folder), strict=True)
        }
        truth = retrained(study, asked.halves, folder)
    rows, ceiling = table(study, ways(study, made), truth)
    about = environment("cpu", ("torch", "transformers", "scikit-learn", "numpy"))
    print(about)
    for i, kind in enumerate(_KINDS):
        for name, found in losses.items():
            own = found[:, i::3]
            print(
                f"{kind}, trained on {name}: median loss of the answer {np.median(own):.2f} nats, "
                f"probability above a half for {(own < np.log(2)).mean():.0%}"
            )
    print(
        "| way | copy | reworded | renamed | MRR | in 10 | LDS | baseline | MRR more | LDS more |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        each = " | ".join(
            f"{getattr(row, kind):.2f}, {getattr(row, f'median_{kind}'):.0f}" for kind in _KINDS
        )
        print(
            f"| {row.way} | {each} | {row.mrr:.2f} ({row.mrr_low:.2f} to {row.mrr_high:.2f}) | "
            f"{row.found_in_10:.2f} | {row.lds:.2f} ({row.lds_low:.2f} to {row.lds_high:.2f}) | "
            f"{row.baseline} | {row.mrr_more:+.2f} ({row.mrr_more_low:+.2f} to "
            f"{row.mrr_more_high:+.2f}) | {row.lds_more:+.2f} ({row.lds_more_low:+.2f} to "
            f"{row.lds_more_high:+.2f}) |"
        )
    print(f"noise ceiling: {ceiling[0]:.2f} to {ceiling[1]:.2f}")
    for what, seconds in seconds_by_words(study).items():
        print(f"gradients of {what}: {seconds:.2f} s")
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
