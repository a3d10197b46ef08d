"""Compare methods by how well they predict a language model's outputs after texts are dropped.

    python benchmarks/board.py --folder board --size small --peers /tmp/peers
    python benchmarks/board.py --folder board-1 --size small --seed 1 --peers /tmp/peers
    python benchmarks/board.py --folder evening --size evening --text manual --cores 2

A small GPT-2 is trained on pieces of docstrings or of Python's manual. 50 pieces are held out as
questions. The model is retrained with 1, 10 and 50 % of the pieces dropped, with the same initial
weights and order, and with the weights and orders of two other seeds. The LDS of a method is
Spearman's correlation between predicted and actual log p of a question over drops, averaged over
questions. All results are stored as files in the folder, so a second start continues where the
first stopped.

All methods are compared on the same drops, so differences between rows are paired. Intervals are 95
% bootstrap intervals over drops and questions. The first output tests whether drops are large
enough: it is the correlation of their effects with the effects if the initial weights are perturbed
by 1e-4 of their size. Kinds of drops with a correlation below .8 are left out.

--peers names the folder with other packages' environments (benchmarks/board_rivals.py); packages
without an environment have no rows. --draws 0 4 --dampings 0.3 1 adds rows of `label_draws`,
computed by `Attributor`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import yaml
from board_scores import OURS, all_scores, drawn_scores
from board_study import DROPS, SIZES, TEXTS, Board, Size, Training, board, trainings
from shared import environment, write_csv

from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import bootstrap, rank_correlations

_PACKAGES = "kronfluence", "bergson", "dattri", "logix"
_LEAST, _FEWEST = 0.8, 4


@dataclass(frozen=True)
class Row:
    """The LDS of a method for a kind of subsets, and its difference from the baseline's."""

    scores: str
    drops: str
    trainings: int
    lds: float
    low: float
    high: float
    below_ours: float
    below_ours_low: float
    below_ours_high: float


def _train(size: Size, text: str, folder: Path, one: Training) -> str:
    torch.set_num_threads(1)
    one.run(board(size, text), folder)
    return one.name


def train_missing(size: Size, text: str, folder: Path, cores: int) -> None:
    """Run the trainings that have no file yet."""
    missing = [one for one in trainings(size) if not (folder / f"{one.name}.npz").exists()]
    with ProcessPoolExecutor(cores) as pool:
        for name in pool.map(partial(_train, size, text, folder), missing):
            print(f"{name} of {len(missing)}", file=sys.stderr, flush=True)


def check_folder(folder: Path, size: Size, text: str) -> None:
    """Exit with an error if the folder belongs to another board."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = board(size, text).digest
    path, about = folder / "about.yaml", {"text": text, "digest": digest, **asdict(size)}
    if path.exists() and yaml.safe_load(path.read_text()) != about:
        sys.exit(f"{folder} holds another board ({path.read_text()}): take another folder")
    path.write_text(yaml.safe_dump(about))


def rivals_scores(folder: Path, peers: Path | None, n: int, m: int) -> dict[str, np.ndarray]:
    """Return scores of the other packages whose environments exist."""
    found: dict[str, np.ndarray] = {}
    for name in _PACKAGES:
        path = folder / f"rival-{name}.npz"
        if not path.exists() and peers is not None:
            python, script = peers / name / "bin/python", Path(__file__).parent / "board_rivals.py"
            if not python.exists():
                print(f"{name}: not run, {python} is not there")
                continue
            done = subprocess.run(
                [str(python), str(script), name, "--folder", str(folder)],
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(f"{name}: failed, {done.stderr.strip().splitlines()[-1]}")
        if path.exists():
            with np.load(path) as file:
                found |= {label: file[label] for label in file.files}
    for label, scores in found.items():
        if scores.shape != (n, m) or not np.isfinite(scores).all():
            sys.exit(f"{label}: scores of shape {scores.shape}, or not finite")
    return found


def _read(folder: Path, kind: str, drop: int, turn: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return masks of the kept pieces, (S, n), and log p of the questions, (S, m)."""
    weights, outputs = [], []
    for i in range(10_000):
        path = folder / f"{kind}-{drop}-{i}{turn}.npz"
        if not path.exists():
            break
        with np.load(path) as file:
            weights.append(file["weights"])
            outputs.append(file["outputs"])
    return np.array(weights), np.array(outputs)


def truths(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return masks (S, n) and outputs (seeds, S, m) of each kind of drops that is large enough."""
    found = {}
    for drop in DROPS:
        masks, outputs = _read(folder, "same", drop)
        again = _read(folder, "again", drop)[1]
        if len(again) >= _FEWEST:
            alike = rank_correlations(outputs[: len(again)], again).mean()
            print(
                f"{drop} %, the same seed, {len(again)} drops with perturbed weights: {alike:.3f}"
            )
            if alike >= _LEAST:
                found[f"{drop} %, the same seed"] = masks, outputs[None]
    for drop in DROPS:
        (masks, first), (_, second) = (_read(folder, "other", drop, f"-{i}") for i in range(2))
        count = min(len(first), len(second))
        if count >= _FEWEST:
            outputs = np.stack([first[:count], second[:count]])
            found[f"{drop} %, two other seeds each"] = masks[:count], outputs
    return found


def table(
    scores: Mapping[str, np.ndarray],
    known: Mapping[str, tuple[np.ndarray, np.ndarray]],
    baseline: str = OURS,
) -> list[Row]:
    """Return a row for each set of scores and each kind of drops."""
    names, rows = list(scores), []
    ours = names.index(baseline)
    for drops, (masks, outputs) in known.items():
        sums = [masks @ scores[name] for name in names]
        mean = outputs.mean(axis=0)
        lds = np.array([rank_correlations(one, mean).mean() for one in sums])
        drawn = bootstrap(sums, outputs)
        if len(outputs) > 1:
            low, high = np.transpose(interval(drawn, axis=0))[-1]
            print(f"{drops}: noise ceiling {low:.3f} to {high:.3f}")
            drawn = drawn[:, :-1]
        own, below = (
            np.transpose(interval(drawn - base, axis=0)) for base in (0, drawn[:, [ours]])
        )
        for i, name in enumerate(names):
            cells = [lds[i], *own[i], lds[i] - lds[ours], *below[i]]
            rows.append(Row(name, drops, len(masks), *(round(float(x), 4) for x in cells)))
    return rows


def show(rows: list[Row]) -> None:
    """Print the table, one line for each set of scores."""
    kinds = dict.fromkeys(row.drops for row in rows)
    for number, kind in enumerate(kinds, 1):
        count = next(row.trainings for row in rows if row.drops == kind)
        print(f"({number}) {kind}: {count} drops")
    print("| scores | " + " | ".join(f"({i}), less ours" for i in range(1, len(kinds) + 1)) + " |")
    print("|---" * (1 + len(kinds)) + "|")
    for name in dict.fromkeys(row.scores for row in rows):
        cells = [
            f"{row.lds:.3f}, {row.below_ours:+.3f} ({row.below_ours_low:+.3f} to "
            f"{row.below_ours_high:+.3f})"
            for row in rows
            if row.scores == name
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run the missing trainings, compute the missing scores, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="folder of all results")
    parser.add_argument("--text", default="docstrings", choices=TEXTS)
    parser.add_argument("--size", default="small", choices=SIZES, help="of texts and model")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, orders and drops")
    parser.add_argument("--cores", type=int, default=1, help="trainings at once")
    parser.add_argument("--peers", type=Path, help="other packages' environments, by name")
    parser.add_argument("--draws", type=int, nargs="*", default=[], help="numbers of drawn labels")
    parser.add_argument("--dampings", type=float, nargs="*", default=[1], help="of these rows")
    parser.add_argument("--baseline", default=OURS, help="the method to compare others with")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    asked = parser.parse_args()
    size = replace(SIZES[asked.size], seed=asked.seed)
    check_folder(asked.folder, size, asked.text)
    torch.set_num_threads(1)
    train_missing(size, asked.text, asked.folder, asked.cores)
    about: Board = board(size, asked.text)
    machine = environment("cpu", ("torch", "transformers", "scikit-learn", "numpy"))
    print(machine)
    scores = all_scores(about, asked.folder)
    scores |= drawn_scores(about, asked.folder, asked.draws, asked.dampings)
    scores |= rivals_scores(asked.folder, asked.peers, size.texts, size.questions)
    known = truths(asked.folder)
    if asked.baseline not in scores:
        sys.exit(f"--baseline must be one of {list(scores)}, but it is {asked.baseline!r}")
    rows = table(scores, known, baseline=asked.baseline)
    if not rows:
        sys.exit("no kind of drops has effects that are large enough")
    print(f"baseline: {asked.baseline}")
    show(rows)
    if asked.csv is not None:
        write_csv(asked.csv, rows, machine)


if __name__ == "__main__":
    main()
