"""Is a model that is trained on 5 % of the texts better off with `select` than with a search?

    python benchmarks/select_texts.py --csv select_texts.csv

The study is config/facts.py. 5 % of its training texts (44 of 874) are chosen for the 24 reworded
questions by one way to score after the other; the questions take turns, as for the list `select`.
Models are trained on these texts alone, five seeds, and asked all 72 questions; five draws of
random texts stand beside them. Losses of answers are means over seeds and questions, differences
are paired by both, with 95 % bootstrap intervals over both. The checkpoints that scores come from
are those of config/facts.yaml. --folder keeps their products, for a second start.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from machine import environment, write_csv
from planted_products import Products, along
from planted_ways import Way, bm25, cosines, tf_idf
from torch.utils.data import Subset

from trak_core.attribution.sample_outputs import outputs_and_predictions
from trak_core.evaluation.intervals import mean_interval
from trak_core.lists.lists import best_in_turn
from trak_core.study.study import Study

_STUDY = Path(__file__).parents[1] / "config/facts.py"
_TIMES, _RUNS, _SEEDS, _EPOCHS, _PART, _TOP = (10, 15, 25), 2, 5, 60, 0.05, 20
_KINDS = "copy", "reworded", "renamed"


@dataclass(frozen=True)
class Row:
    """One choice of texts, and the loss of the answers to questions of one kind, in nats."""

    chosen_by: str
    planted: float
    asked: str
    loss: float
    right: float
    first_less: float
    low: float
    high: float


def scored(study: Study, made: dict[tuple[int, int], Products]) -> dict[str, np.ndarray]:
    """Return scores of all texts for all questions, (texts, questions), by way.

    Args:
        study: The planted facts.
        made: Products of checkpoints, by seed and time.
    """
    texts = [study.module.words(text) for text in study.module.training_texts().values()]
    asked = [study.module.words(text) for text, _ in study.module.questions().values()]
    n, m = len(texts), len(asked)
    ends = [one for (_, at), one in made.items() if at == _TIMES[-1]]
    found = {
        f"`select`, damping {damping:g}": np.mean(
            [Way(damping).scores(one.whole(), one.outputs, n, m) for one in made.values()], axis=0
        )
        for damping in (0.1, 2.0)
    }
    return found | {
        "BM25": bm25(texts, asked),
        "TF-IDF": tf_idf(texts, asked),
        "embedding cosine, before the answer": np.mean(
            [cosines(one.ends, n, m) for one in ends], axis=0
        ),
        "embedding cosine, mean of the words": np.mean(
            [cosines(one.means, n, m) for one in ends], axis=0
        ),
    }


def in_turn(scores: np.ndarray) -> np.ndarray:
    """Return the texts that the questions take in turn, by scores (texts, questions)."""
    tables = []
    for target, values in enumerate(scores.T):
        rows = np.argsort(-values, kind="stable")[:_TOP]
        best = {"train_id": rows, "rank": range(1, _TOP + 1), "score": values[rows]}
        tables.append(pd.DataFrame({"target_id": target, **best}))
    train = pd.DataFrame({"id": np.arange(len(scores)), "help": scores.mean(axis=1), "harm": 0.0})
    return best_in_turn(train, pd.concat(tables, ignore_index=True), _PART)["id"].to_numpy()


def losses(study: Study, rows: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the losses of all answers, (seeds, questions), after training on each seed's texts."""
    train, pool = study.split("train", None), study.split("questions", None)
    found = []
    for seed in range(_SEEDS):
        part = Subset(study.module.train_data(), rows(seed).tolist())
        *_, (_, model) = study.module.train(seed=100 + seed, epochs=_EPOCHS, data=part)
        # For one token f is its log-odds: -log p = log(1 + exp(-f)).
        values = outputs_and_predictions(model, "language_modelling", train, pool, 400)[0]
        found.append(np.logaddexp(0, -values))
    return np.stack(found)


def rows_of(study: Study, by_way: dict[str, np.ndarray]) -> list[Row]:
    """Choose texts for the reworded questions, train, and compare with the first way."""
    n = len(study.module.train_ids())
    known = {name: i for i, name in enumerate(study.module.train_ids())}
    planted = {known[text] for _, own in study.module.questions().values() for text in own}
    own_kind = _KINDS.index("reworded")
    chosen = {name: in_turn(scores[:, own_kind :: len(_KINDS)]) for name, scores in by_way.items()}
    size = len(chosen["BM25"])
    by_seed: dict[str, Callable[[int], np.ndarray]] = {
        name: (lambda _, own=own: own) for name, own in chosen.items()
    }
    by_seed["random"] = lambda seed: np.random.default_rng([9, seed]).permutation(n)[:size]
    measured = {name: losses(study, rows) for name, rows in by_seed.items()}
    first, found = next(iter(measured.values())), []
    for name, values in measured.items():
        own = np.mean([len(planted & {*by_seed[name](seed).tolist()}) for seed in range(_SEEDS)])
        for other, asked in enumerate(_KINDS):
            of_kind, less = values[:, other::3], first[:, other::3] - values[:, other::3]
            right = (of_kind < np.log(2)).mean()
            cells = float(of_kind.mean()), float(right), float(less.mean())
            interval = map(float, mean_interval(less))
            found.append(Row(name, float(own), asked, *cells, *interval))
    return found


def main() -> None:
    """Choose, train, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keeps products of gradients")
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        folder.mkdir(exist_ok=True)
        study = Study.load(_STUDY)
        made = {
            (seed, at): found
            for seed in range(_RUNS)
            for at, found in zip(_TIMES, along(study, seed, _TIMES, folder), strict=True)
        }
    rows = rows_of(study, scored(study, made))
    about = environment("cpu", ("torch", "transformers", "scikit-learn", "numpy"))
    print(about)
    print("| chosen by | planted texts | asked | loss | p > 1/2 | first row less |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.chosen_by} | {row.planted:.0f} | {row.asked} | "
            f"{row.loss:.2f} | {row.right:.0%} | {row.first_less:+.2f} "
            f"[{row.low:+.2f}, {row.high:+.2f}] |"
        )
    if asked.csv:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
