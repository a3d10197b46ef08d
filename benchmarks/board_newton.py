"""Scores of the board's questions by `projection: gauss_newton`, through the pipeline.

    python benchmarks/board_newton.py --folder board

A folder of board.py holds a training's end and what drops of pieces do. This is the study of that
end too, so that `trak run` scores it, with the pipeline's defaults or another damping. Prints LDS
of each kind of drops, above inner products of whole gradients with damping 0.3 from the same end,
with paired 95 % intervals, and the job's seconds. board.py makes rows of the file newton.npz.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from board import truths
from board_scores import loaded
from board_study import Board, Size, board, save, written
from board_study import make_model as model_of
from machine import environment
from planted_ways import Way
from torch import Tensor, nn

from trak_core.evaluation.intervals import interval
from trak_core.evaluation.lds import bootstrap, rank_correlations

_FOLDER = "TRAK_CORE_BOARD"  # where the study finds its board
_END = 1.0


def _board(folder: Path) -> Board:
    given = yaml.safe_load((folder / "about.yaml").read_text(encoding="utf-8"))
    text = given.pop("text")
    return board(Size(**{name: value for name, value in given.items() if name != "digest"}), text)


def make_model() -> nn.Module:
    """Return the board's model."""
    return model_of(_board(Path(os.environ[_FOLDER])).size)


def _samples(tokens: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": piece, "labels": piece} for piece in tokens]


def train_data() -> list[dict[str, Tensor]]:
    """Return the training pieces."""
    return _samples(_board(Path(os.environ[_FOLDER])).train)


def target_data() -> list[dict[str, Tensor]]:
    """Return the questions."""
    return _samples(_board(Path(os.environ[_FOLDER])).asked)


def _scored(folder: Path, damping: float) -> tuple[np.ndarray, float]:
    """Run the pipeline in the board's folder; return scores (n, m) and the job's seconds."""
    results = f"newton-{damping:g}"
    config = {
        **{"study": str(Path(__file__).resolve()), "model_output": "language_modelling"},
        **{"checkpoints": {"end": "end.pt"}, "experiments": {"all": {"targets": "all"}}},
        **{"projection": "gauss_newton", "scoring": {"damping": damping}, "results": results},
    }
    (folder / f"{results}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "trak_core.command.main", "run", f"{results}.yaml"]
    environ = os.environ | {_FOLDER: str(folder.resolve()), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--cores", "1", "scores"], cwd=folder, env=environ, check=True)
    timed = folder / results / "benchmarks/compute_newton_scores/all/end.tsv"
    seconds = float(pd.read_csv(timed, sep="\t")["s"].iloc[0])
    scores = pd.read_hdf(folder / results / "scores/all.h5", "scores")
    return np.asarray(scores), seconds


def main() -> None:
    """Score, judge, and write the scores into the board's folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dampings", type=float, nargs="+", default=[0.1])
    asked = parser.parse_args()
    print(environment("cpu", ("torch", "transformers")))
    torch.set_num_threads(1)
    about = _board(asked.folder)
    n, m = about.size.texts, about.size.questions
    model = loaded(about, asked.folder, "run-0", _END)[0]
    torch.save(model.state_dict(), asked.folder / "end.pt")
    with np.load(asked.folder / f"products-run-0-{_END}.npz") as file:
        rows = {"exact, damping 0.3": Way(0.3).scores(file["plain"], file["outputs"], n, m)}
    for damping in asked.dampings:
        name = f"its end, Gauss-Newton, damping {damping:g}"
        rows[name], seconds = _scored(asked.folder, damping)
        print(f"{name}: {seconds:.0f} s, {seconds / m:.1f} s a question")
    written(asked.folder / "newton.npz", lambda path: save(path, dict([*rows.items()][1:])))
    for drops, (left_out, outputs) in truths(asked.folder).items():
        sums = [left_out @ scores for scores in rows.values()]
        drawn = bootstrap(sums, outputs)
        for i, name in enumerate(rows):
            lds = rank_correlations(sums[i], outputs.mean(0)).mean()
            low, high = interval(drawn[:, i] - drawn[:, 0], axis=0)
            print(f"| {drops} | {name} | {lds:.2f}, {low:+.2f} to {high:+.2f} |")


if __name__ == "__main__":
    main()
