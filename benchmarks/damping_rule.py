"""Is the damping that a run's own changes suggest the one that foretells retraining?

    python benchmarks/damping_rule.py --classes digits_mlp diabetes --boards board --folder runs

Classes are cases of benchmarks/small_changes.py, judged by halves left out of two runs, boards are
folders of benchmarks/board.py whose trainings are done, judged by drops of 10 %. Each study gets
one row for each choice of a first checkpoint, which foretells changes up to the end of its run, and
projection. A row has LDS with damping 2, with the suggested one, and with the best of those that
are tried; that with the suggested one comes with how far it is above that with 2, paired, with a
95 % bootstrap interval over drops and targets. Scores of classes are of the first checkpoint and
the end of each run, with the pipeline's defaults; those of boards of all four times. With --facts
the folder of planted facts (benchmarks/dampings.py) is asked for a suggestion alone.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import yaml
from board import truths
from board_scores import products_of
from board_study import TIMES, Size, board
from machine import environment, write_csv
from planted_facts import STUDY
from planted_products import along
from planted_ways import Way
from small_changes import CASES, Measured

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.config.cross_checks import usual_power, usual_weighting
from trak_core.evaluation.lds import bootstrap, rank_correlations
from trak_core.evaluation.subset_sums import CheckpointRows, average_weights, setting_sums
from trak_core.model_outputs.about_outputs import about_output
from trak_core.scoring.intervals import interval
from trak_core.scoring.solve import Spectrum, mean_squared_norm
from trak_core.scoring.suggest_damping import (
    DAMPINGS,
    Foretold,
    foretold_changes,
    foretold_samples,
    suggest_damping,
)
from trak_core.spec import Combine, Setting, curvature_power
from trak_core.study.study import Study

_OWN = 2.0
_FACTS_TIMES = 10, 15, 25


@dataclass(frozen=True)
class Row:
    """One study: what is suggested, and what that, damping 2 and the best are worth."""

    study: str
    first: float
    suggested: float
    agreement: float
    agreement_of_2: float
    is_clear: bool
    lds_of_2: float
    lds: float
    above: float
    low: float
    high: float
    best: float
    lds_of_best: float


def foretold(
    phi: np.ndarray, q: np.ndarray, weights: np.ndarray, before: np.ndarray, after: np.ndarray
) -> Foretold:
    """Return what training features (n, k) foretell, and how outputs did change."""
    phi = phi.astype(np.float64)
    rows = foretold_samples(len(phi))
    normal = phi.T @ (weights[:, None] * phi)
    spectrum, unit = Spectrum.decompose(normal), mean_squared_norm(normal, len(phi))
    changes = foretold_changes(spectrum, phi.T @ q, phi[rows], unit)
    return Foretold(changes, np.linalg.norm(phi[rows], axis=1), (after - before)[rows])


def judged(
    name: str,
    first: float,
    runs: Sequence[Foretold],
    sums: dict[float, np.ndarray],
    outputs: np.ndarray,
) -> Row | None:
    """Return a study's row from sums of scores (S, m) by damping and outputs (seeds, S, m)."""
    suggestion = suggest_damping(runs, _OWN)
    if suggestion is None:
        print(f"{name}, {first:g}: no suggestion", flush=True)
        return None
    lds = {d: float(rank_correlations(own, outputs.mean(0)).mean()) for d, own in sums.items()}
    best = max(lds, key=lambda d: lds[d])
    drawn = bootstrap([sums[_OWN], sums[suggestion.damping]], outputs)
    low, high = interval(drawn[:, 1] - drawn[:, 0], axis=0)
    row = Row(
        *(name, first, suggestion.damping),
        *(round(suggestion.agreement, 3), round(suggestion.own, 3), suggestion.is_clear),
        *(round(lds[_OWN], 3), round(lds[suggestion.damping], 3)),
        round(lds[suggestion.damping] - lds[_OWN], 3),
        *(round(float(low), 3), round(float(high), 3), best, round(lds[best], 3)),
    )
    print(row, flush=True)
    return row


def of_classes(name: str, folder: Path, runs: int, targets: int, subsets: int) -> list[Row | None]:
    """Return a row for each time, but the end, at which the first checkpoint may be saved."""
    case = replace(CASES[name], n_targets=targets, subsets=subsets)
    shared = targets == CASES[name].n_targets
    measured = Measured(case, folder / (name if shared else f"{name}-{targets}"), runs)
    truth = measured.truth(0.5)
    combine, output = Combine.UNIT_AVERAGE, case.model_output
    power = usual_power(combine, output)
    w_power = curvature_power(
        usual_weighting(combine, output),
        power,
        is_probability=about_output(output).weight_is_probability,
    )
    read = {}
    for run, at in product(range(runs), case.times):
        arrays = []
        for split in ("train", "targets"):
            with open_artifact(measured.folder / f"{run}-{at}-{split}.h5", FEATURES) as file:
                arrays += [file.matrix("features")[:], file.vector("outputs").astype(float)]
        q = measured.weights[run, at].astype(float)
        weights = measured.curvature[run, at] ** w_power if w_power is not None else np.ones(len(q))
        read[run, at] = (*arrays, q, weights)
    k = read[0, case.times[0]][0].shape[1]
    settings = [Setting(d, power, combine, k) for d in sorted({*DAMPINGS, _OWN})]
    rows = []
    for first in case.times[:-1]:
        chosen = list(product(range(runs), [first, case.times[-1]]))
        averages = average_weights(settings, [measured.weights[one] for one in chosen])
        sums = {setting.damping: np.zeros(()) for setting in settings}
        for one in chosen:
            phi, _, of_targets, _, _, weights = read[one]
            checkpoint = CheckpointRows(
                loss_weights=measured.weights[one],
                normal_weights={power: weights},
                read=lambda start, stop, phi=phi: phi[start:stop],
                target_features=of_targets.astype(float),
                block=len(phi),
            )
            for setting, share in setting_sums(truth.masks, settings, averages, checkpoint).items():
                sums[setting.damping] = sums[setting.damping] + share
        own = []
        for run in range(runs):
            phi, before, _, _, q, weights = read[run, first]
            own.append(foretold(phi, q, weights, before, read[run, case.times[-1]][1]))
        rows.append(judged(name, first, own, sums, truth.outputs))
    return rows


def of_board(folder: Path) -> list[Row | None]:
    """Return a row for each projection."""
    given = yaml.safe_load((folder / "about.yaml").read_text(encoding="utf-8"))
    text = given.pop("text")
    size = Size(**{name: value for name, value in given.items() if name != "digest"})
    about, n, m = board(size, text), size.texts, size.questions
    made = [products_of(about, folder, "run-0", at, None) for at in TIMES]
    masks, outputs = truths(folder)["10 %, the same seed"]
    rows = []
    for kind in ("dense", "sketch"):
        sums = {}
        for damping in {*DAMPINGS, _OWN}:
            shares = [Way(damping).scores(p[kind] @ p[kind].T, p["outputs"], n, m) for p in made]
            sums[damping] = masks @ np.mean(shares, axis=0)
        for i, at in enumerate(TIMES[:-1]):
            before, after = (made[j]["outputs"][:n].astype(float) for j in (i, -1))
            own = foretold(made[i][kind][:n], np.ones(n), np.ones(n), before, after)
            rows.append(judged(f"{folder.name}, {kind}", at, [own], sums, outputs))
    return rows


def of_facts(folder: Path) -> None:
    """Print what the planted facts' runs suggest."""
    study = Study.load(STUDY)
    n = len(study.module.train_ids())
    runs = [along(study, seed, _FACTS_TIMES, folder) for seed in range(2)]
    own = [
        foretold(
            one[0].projected[:n],
            *(1 / (1 + np.exp(one[0].outputs[:n].astype(float))), np.ones(n)),
            *(one[i].outputs[:n].astype(float) for i in (0, -1)),
        )
        for one in runs
    ]
    print("planted facts:", suggest_damping(own, _OWN) or "no suggestion")


def main() -> None:
    """Measure every study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--classes", nargs="*", default=[], choices=CASES)
    parser.add_argument("--boards", type=Path, nargs="*", default=[], help="folders of board.py")
    parser.add_argument("--facts", type=Path, help="folder of dampings.py's planted facts")
    parser.add_argument("--folder", type=Path, help="keeps the classes' trainings")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--targets", type=int, default=30)
    parser.add_argument("--subsets", type=int, default=40)
    parser.add_argument("--csv", type=Path, help="where the table goes as well")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = environment("cpu", ("torch", "numpy", "trak-core"))
    print(about)
    rows = [row for folder in asked.boards for row in of_board(folder)]
    for name in asked.classes:
        rows += of_classes(name, asked.folder, asked.runs, asked.targets, asked.subsets)
    if asked.facts:
        of_facts(asked.facts)
    known = [row for row in rows if row is not None]
    if asked.csv is not None:
        write_csv(asked.csv, known, about)


if __name__ == "__main__":
    main()
