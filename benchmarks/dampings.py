"""Which damping and projection serve a study? Paired intervals on texts, digits and a table.

    python benchmarks/dampings.py --boards docstrings --facts facts --classes digits --folder runs

Boards are folders of benchmarks/board.py whose trainings are done; each is judged by its drops. In
the folder of planted facts (benchmarks/planted_facts.py) trainings are made that are missing; they
are judged by planted texts' reciprocal ranks and by LDS over halves. Classes are cases of
benchmarks/small_changes.py, whose --folder it shares: one run's end is judged by halves left out of
two runs. Projections are what the pipeline takes: k = 1,024, k = 4,096 (texts: random signs and
`tensor_sketch`), and `exact`. In the first table each cell is the measure at a damping, and beside
it how far it is above that of damping 2 with the same checkpoints and projection, with a 95 %
bootstrap interval; in the second how far a wider projection is above k = 1,024.
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
from planted_products import Products, along, features
from planted_ways import Scored, Way
from small_changes import CASES, Measured

from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import bootstrap, rank_correlations
from trak_core.gradients import as_batch, formed_gradients, gradients_at_once, select_parameters
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.spec import usual_kind
from trak_core.study.load_checkpoint import load_checkpoint
from trak_core.study.study import Study

_DAMPINGS = 2.0, 1.0, 0.3, 0.1, 0.03
_NARROW = "k = 1,024"
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
    checkpoints: Mapping[str, list[tuple[Kernels, np.ndarray]]],
    n: int,
    m: int,
    power: float = Way.power,
) -> dict[Case, np.ndarray]:
    """Return scores of every choice of checkpoints, projection and damping, each (n, m).

    Args:
        checkpoints: Inner products by projection, and f, of each checkpoint of a choice.
        n: Training texts.
        m: Questions.
        power: The exponent of the loss weights.
    """
    return {
        (chosen, projection, damping): np.mean(
            [Way(damping, power=power).scores(kernels[projection], f, n, m) for kernels, f in made],
            axis=0,
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
    return [
        row
        for drops, (masks, outputs) in truths(folder).items()
        for row in judged(folder.name, drops, scores, masks, outputs)
    ]


def judged(
    study: str, by: str, scores: Mapping[Case, np.ndarray], masks: np.ndarray, outputs: np.ndarray
) -> list[Row]:
    """Return the rows of scores that are judged by LDS.

    Args:
        study: Its name.
        by: What the subsets are.
        scores: By case, each (n, m).
        masks: 1 where a subset has a sample, (S, n).
        outputs: f, (seeds, S, m).
    """
    sums = [masks @ one for one in scores.values()]
    mean, drawn = outputs.mean(axis=0), bootstrap(sums, outputs)
    lds = [float(rank_correlations(one, mean).mean()) for one in sums]
    cases, rows = list(scores), []
    for i, case in enumerate(cases):
        numbers = [lds[i]]
        for j in map(cases.index, _beside(case)):
            ends = np.transpose(interval(drawn[:, [i]] - drawn[:, [j]], axis=0))[0]
            numbers += [lds[i] - lds[j], *map(float, ends)]
        rows.append(Row(study, by, *case, *numbers))
    return rows


def of_classes(name: str, folder: Path) -> list[Row]:
    """Return the rows of one run's end of a classifier, with the defaults for one checkpoint."""
    case = CASES[name]
    measured = Measured(case, folder / name)
    study, output = Study.load(case.path), TABLE[case.model_output].load()
    n, m = len(measured.train_ids), len(measured.targets)
    train, targets = study.split("train", None), study.split("target", measured.targets)
    samples = [split.batch(0, len(split.ids)) for split in (train, targets)]
    batch = as_batch([torch.cat(pair) for pair in zip(*samples, strict=True)], output)
    model = study.make_model().eval()
    load_checkpoint(model, folder / name / f"0-{case.times[-1]}.pt")
    chosen = select_parameters(model, None)
    formed = formed_gradients(gradients_at_once, model, chosen, output, batch)
    n_params = sum(p.numel() for p in chosen.values())
    own = np.sum([(block @ block.T).double().numpy() for block in formed.blocks()], axis=0)
    kernels: dict[str, np.ndarray] = {"exact": own}
    for label, k in {_NARROW: 1024, "k = 4,096": 4096}.items():
        made = features(model, [batch], usual_kind(n_params, k), k, k, output).astype(float)
        kernels[label] = made @ made.T
    scores = all_dampings({"its end": [(kernels, formed.outputs.numpy())]}, n, m, power=0.5)
    truth = measured.truth(0.5)
    return judged(name, "halves", scores, truth.masks, truth.outputs)


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
    """Print a line for each choice of checkpoints and projection, and one for each wider one."""
    by_setting: dict[tuple[str, ...], dict[float, Row]] = {}
    for row in rows:
        about = row.study, row.judged_by, row.checkpoints, row.projection
        by_setting.setdefault(about, {})[row.damping] = row
    names = "study", "judged by", "checkpoints", "projection", *map(str, _DAMPINGS)
    for wider in (False, True):
        print(f"| {' | '.join(names)} |")
        print("|---" * len(names) + "|")
        for about, own in by_setting.items():
            cells = []
            for damping, row in own.items():
                more = row.more, row.more_low, row.more_high
                if wider:
                    more = row.wider, row.wider_low, row.wider_high
                beside = f", {more[0]:+.3f} ({more[1]:+.3f} to {more[2]:+.3f})"
                is_base = damping == _DAMPINGS[0] and not wider
                cells.append(f"{row.value:.3f}{'' if is_base else beside}")
            if not wider or about[-1] != _NARROW:
                print(f"| {' | '.join(about)} | {' | '.join(cells)} |")


def main() -> None:
    """Measure every study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--boards", type=Path, nargs="*", default=[], help="folders of board.py")
    parser.add_argument("--facts", type=Path, help="keeps the planted facts' trainings")
    parser.add_argument("--halves", type=int, default=20, help="of planted facts, tens")
    parser.add_argument("--classes", nargs="*", default=[], choices=CASES, help="digits, a table")
    parser.add_argument("--folder", type=Path, help="keeps the classes' trainings")
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "transformers", "numpy"))
    print(about)
    rows = [row for folder in asked.boards for row in of_board(folder)]
    rows += of_facts(asked.facts, asked.halves) if asked.facts else []
    if asked.classes and not asked.folder:
        parser.error("--classes needs --folder")
    rows += [row for name in asked.classes for row in of_classes(name, asked.folder)]
    rows = [
        replace(row, **{k: round(v, 4) for k, v in vars(row).items() if isinstance(v, float)})
        for row in rows
    ]
    show(rows)
    if asked.csv is not None:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
