"""Which damping serves texts, with and without a projection? Paired intervals on several studies.

    python benchmarks/text_dampings.py --boards docstrings tuned manual --facts facts

Boards are folders of benchmarks/board.py whose trainings are done; each is judged by its drops. In
the folder of planted facts (benchmarks/planted_facts.py) trainings are made that are missing; they
are judged by planted texts' reciprocal ranks and by LDS over halves. Projections are what the
pipeline takes: random signs with k = 1,024, `tensor_sketch` with k = 4,096, and `exact`. Each cell
is the measure at a damping, and beside it how far it is above that of damping 2 with the same
checkpoints and projection, with a 95 % bootstrap interval. The last column is how far damping 0.3
is above the same with k = 1,024.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from board import truths
from board_scores import products_of
from board_study import TIMES, Size, board
from machine import environment, write_csv
from planted_facts import STUDY, retrained, table
from planted_products import Products, along
from planted_ways import Scored, Way

from trak_core.evaluation.lds import bootstrap, percentiles, rank_correlations
from trak_core.study.study import Study

_DAMPINGS = 2.0, 1.0, 0.3, 0.1, 0.03
_NARROW, _USUAL = "k = 1,024", 0.3
_FACTS_RUNS, _FACTS_TIMES = 2, (10, 15, 25)  # as config/facts.yaml has them
Kernels = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One damping of one study, beside damping 2, and beside the narrowest projection."""

    study: str
    judged_by: str
    checkpoints: str
    projection: str
    damping: float
    value: float
    more: float
    more_low: float
    more_high: float
    wider: float
    wider_low: float
    wider_high: float


Case = tuple[str, str, float]  # checkpoints, projection, damping


def all_dampings(
    checkpoints: Mapping[str, list[tuple[Kernels, np.ndarray]]], n: int, m: int
) -> dict[Case, np.ndarray]:
    """Return scores of every choice of checkpoints, projection and damping, each (n, m).

    Args:
        checkpoints: Inner products by projection, and f, of each checkpoint of a choice.
        n: Training texts.
        m: Questions.
    """
    return {
        (chosen, projection, damping): np.mean(
            [Way(damping).scores(kernels[projection], f, n, m) for kernels, f in made], axis=0
        )
        for chosen, made in checkpoints.items()
        for projection in made[0][0]
        for damping in _DAMPINGS
    }


def _beside(case: Case) -> tuple[Case, Case]:
    """Return what a case is compared with: damping 2, and the narrowest projection."""
    return (case[0], case[1], _DAMPINGS[0]), (case[0], _NARROW, case[2])


def of_board(folder: Path) -> list[Row]:
    """Return the rows of a board's drops."""
    given = yaml.safe_load((folder / "about.yaml").read_text())
    text = given.pop("text")
    size = Size(**{name: value for name, value in given.items() if name != "digest"})
    about, n, m = board(size, text), size.texts, size.questions
    made = []
    for at in TIMES:
        one = products_of(about, folder, "run-0", at, None)
        kernels = {
            _NARROW: one["dense"] @ one["dense"].T,
            "k = 4,096": one["sketch"] @ one["sketch"].T,
            "exact": one["plain"],
        }
        made.append((kernels, one["outputs"]))
    scores = all_dampings({"along a run": made, "its end": made[-1:]}, n, m)
    rows = []
    for drops, (masks, outputs) in truths(folder).items():
        sums = [masks @ one for one in scores.values()]
        mean, drawn = outputs.mean(axis=0), bootstrap(sums, outputs)
        lds = [float(rank_correlations(one, mean).mean()) for one in sums]
        cases = list(scores)
        for i, case in enumerate(cases):
            numbers = [lds[i]]
            for j in map(cases.index, _beside(case)):
                ends = percentiles(drawn[:, [i]] - drawn[:, [j]])[0]
                numbers += [lds[i] - lds[j], *map(float, ends)]
            rows.append(Row(folder.name, drops, *case, *numbers))
    return rows


def of_facts(folder: Path, halves: int) -> list[Row]:
    """Return the rows of the planted facts."""
    folder.mkdir(exist_ok=True)
    study = Study.load(STUDY)
    n, m = len(study.module.train_ids()), len(study.module.target_ids())

    def made(one: Products) -> tuple[Kernels, np.ndarray]:
        kernels = {
            _NARROW: one.narrow @ one.narrow.T,
            "k = 4,096": one.projected @ one.projected.T,
            "exact": one.whole(),
        }
        return kernels, one.outputs

    runs = [along(study, seed, _FACTS_TIMES, folder) for seed in range(_FACTS_RUNS)]
    scores = all_dampings(
        {
            "along two runs": [made(one) for run in runs for one in run],
            "their ends": [made(run[-1]) for run in runs],
        },
        n,
        m,
    )
    truth = retrained(study, halves, folder)
    tables = [
        table(study, [Scored(str(c), scores[c], str(_beside(c)[i])) for c in scores], truth)[0]
        for i in range(2)
    ]
    rows = []
    for case, *both in zip(scores, *tables, strict=True):
        for measure, words in {"mrr": "reciprocal ranks", "lds": "halves, other seeds"}.items():
            ends = [f"{measure}_more{end}" for end in ("", "_low", "_high")]
            numbers = [vars(both[0])[measure], *(vars(row)[end] for row in both for end in ends)]
            rows.append(Row("planted facts", words, *case, *numbers))
    return rows


def show(rows: list[Row]) -> None:
    """Print a line for each choice of checkpoints and projection."""
    names = "study", "judged by", "checkpoints", "projection", *map(str, _DAMPINGS), "k"
    print(f"| {' | '.join(names)} |")
    print("|---" * len(names) + "|")
    lines: dict[tuple[str, ...], list[str]] = {}
    wider: dict[tuple[str, ...], str] = {}
    for row in rows:
        cell = f"{row.value:.3f}"
        if row.damping != _DAMPINGS[0]:
            cell += f", {row.more:+.3f} ({row.more_low:+.3f} to {row.more_high:+.3f})"
        about = row.study, row.judged_by, row.checkpoints, row.projection
        lines.setdefault(about, []).append(cell)
        if row.damping == _USUAL:
            wider[about] = f"{row.wider:+.3f} ({row.wider_low:+.3f} to {row.wider_high:+.3f})"
    for about, cells in lines.items():
        cells.append(wider[about])
        print(f"| {' | '.join(about)} | {' | '.join(cells)} |")


def main() -> None:
    """Measure every study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--boards", type=Path, nargs="*", default=[], help="folders of board.py")
    parser.add_argument("--facts", type=Path, help="keeps the planted facts' trainings")
    parser.add_argument("--halves", type=int, default=20, help="of planted facts, tens")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "transformers", "numpy"))
    print(about)
    rows = [row for folder in asked.boards for row in of_board(folder)]
    rows += of_facts(asked.facts, asked.halves) if asked.facts else []
    rows = [
        replace(row, **{k: round(v, 4) for k, v in vars(row).items() if isinstance(v, float)})
        for row in rows
    ]
    show(rows)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
