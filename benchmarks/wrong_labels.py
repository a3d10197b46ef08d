"""Compare the list `suspects` with cleanlab by how well they find wrong labels.

    python benchmarks/wrong_labels.py --csv wrong_labels.csv

The study is `studies/annotated_digits.py`, with five draws of digits and of wrong labels. `trak
run` writes `suspects` and `groups` from three runs with two checkpoints each, k = 512, with the 500
held-out digits as targets.

cleanlab, if installed, ranks samples by its normalized margin. The probabilities are from five
models of the same kind. Each is trained without a fifth of the samples, and predicts these. For a
second row, the models are also trained on the held-out digits and their correct labels, because
`suspects` uses these labels too. AUC is the probability that a wrong label ranks before a correct
label, and `precision` is the fraction of wrong labels among the first n samples, where n is the
number of wrong labels. Intervals are 95 % bootstrap intervals over draws and samples of the paired
difference between `suspects` and the row. The first draw's scores by annotator are printed too.
"""

import argparse
import importlib
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml
from shared import environment, write_csv
from sklearn.metrics import roc_auc_score
from torch.utils.data import ConcatDataset, Subset

_REPOSITORY = Path(__file__).parents[1]
_RUNS, _FOLDS, _STEPS = 3, 5, 300
_BOOTSTRAP = 1000
_CONFIG = {
    **{"study": "study.py", "model_output": "image_classification"},
    "training": {"steps": _STEPS, "at": [1, 5]},
    "checkpoints": {f"run{seed}": {"seed": seed} for seed in range(_RUNS)},
    "projection": {"kind": "rademacher", "proj_dim": 512, "seed": 0},
    "scoring": {"damping": 2},
    **{"lists": ["suspects"], "groups": ["annotator"], "results": "results"},
}


@dataclass(frozen=True)
class Row:
    """The AUC and precision of one ranking of the training samples, averaged over draws."""

    ranking: str
    extra_trainings: int
    auc: float
    precision: float
    auc_behind: float
    auc_behind_low: float
    auc_behind_high: float
    precision_behind: float
    precision_behind_low: float
    precision_behind_high: float


@dataclass(frozen=True)
class Draw:
    """One draw of digits and wrong labels; rankings are large for likely wrong labels."""

    is_wrong: np.ndarray
    scores: dict[str, np.ndarray]


def _study(folder: Path, draw: int) -> ModuleType:
    """Write the study of a draw into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (_REPOSITORY / "benchmarks/studies/annotated_digits.py").read_text()
    (folder / "study.py").write_text(text.replace("DRAW = 0", f"DRAW = {draw}"))
    spec = importlib.util.spec_from_file_location(f"study{draw}", folder / "study.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return study


def _suspects(folder: Path, n_held: int) -> pd.DataFrame:
    """Run the pipeline on a study; return its list of suspects."""
    config = _CONFIG | {"experiments": {"held": {"targets": list(range(n_held))}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [sys.executable, "-m", "trak_core.command.main", "run", "config.yaml"]
    wanted = ["results/lists/suspects.csv", "results/groups/held.h5"]
    subprocess.run([*command, *wanted, "--cores=1", "--quiet"], cwd=folder, check=True)
    return pd.read_csv(folder / wanted[0]).set_index("id").sort_index()


def _trained(study: ModuleType, seed: int, data: object) -> torch.nn.Module:
    *_, (_, model) = study.train(_STEPS, seed=seed, data=data)
    return model.eval()


def _cleanlab(study: ModuleType, *, with_held_out: bool) -> np.ndarray:
    """Return cleanlab's scores from models that were trained without the scored samples."""
    data, held = study.train_data(), Subset(study.target_data(), range(study.N_HELD))
    images, labels = data.tensors
    fold = np.random.default_rng(0).permutation(len(data)) % _FOLDS
    probabilities = np.zeros((len(data), 10))
    for number in range(_FOLDS):
        others, own = (np.flatnonzero(part) for part in (fold != number, fold == number))
        part = Subset(data, others.tolist())
        model = _trained(
            study, 100 + number, ConcatDataset([part, held]) if with_held_out else part
        )
        with torch.no_grad():
            probabilities[own] = model(images[own]).softmax(1).double().numpy()
    quality = importlib.import_module("cleanlab.rank").get_label_quality_scores
    return -quality(labels.numpy(), probabilities, method="normalized_margin")


def _harm_alike(folder: Path) -> np.ndarray:
    """Return the harm of every training sample after scaling each target's scores to norm 1."""
    scores: Any = pd.read_hdf(folder / "results/scores/held.h5", "scores")
    alike = scores.sort_index().to_numpy(dtype=np.float64)
    return np.maximum(-alike / np.linalg.norm(alike, axis=0), 0).mean(axis=1)


def _rankings(folder: Path, study: ModuleType) -> Draw:
    listed = _suspects(folder, study.N_HELD)
    scores = {
        "suspects": listed["harm"].to_numpy(),
        "harm, targets alike": _harm_alike(folder),
        "self-influence": listed["self_influence"].to_numpy(),
        "loss weight": listed["loss_weight"].to_numpy(),
    }
    if importlib.util.find_spec("cleanlab"):
        scores["cleanlab"] = _cleanlab(study, with_held_out=False)
        scores["cleanlab, held-out digits in training"] = _cleanlab(study, with_held_out=True)
    return Draw(study.is_wrong, scores)


def _auc(scores: np.ndarray, is_wrong: np.ndarray) -> float:
    return float(roc_auc_score(is_wrong, scores))


def _precision(scores: np.ndarray, is_wrong: np.ndarray) -> float:
    first = np.argsort(-scores, kind="stable")[: int(is_wrong.sum())]
    return float(is_wrong[first].mean())


def _rows(draws: list[Draw]) -> list[Row]:
    """Compare every ranking with `suspects`, by the same bootstrap draws."""
    names = list(draws[0].scores)
    measures: list[Callable[[np.ndarray, np.ndarray], float]] = [_auc, _precision]
    whole = np.array([
        [[m(one.scores[name], one.is_wrong) for one in draws] for name in names] for m in measures
    ]).mean(axis=2)
    random, drawn = np.random.default_rng(0), []
    for _ in range(_BOOTSTRAP):
        means = np.zeros((2, len(names)))
        for number in random.integers(len(draws), size=len(draws)):
            one = draws[number]
            rows = random.integers(len(one.is_wrong), size=len(one.is_wrong))
            for i, measure in enumerate(measures):
                for j, name in enumerate(names):
                    means[i, j] += measure(one.scores[name][rows], one.is_wrong[rows])
        drawn.append(means / len(draws))
    behind = np.array(drawn)[:, :, :1] - np.array(drawn)
    low, high = np.quantile(behind, [0.025, 0.975], axis=0)
    ours = whole[:, :1] - whole
    trainings = [_FOLDS * name.startswith("cleanlab") for name in names]
    return [
        Row(
            name,
            trainings[j],
            *(float(whole[i, j]) for i in range(2)),
            *(float(part[i, j]) for i in range(2) for part in (ours, low, high)),
        )
        for j, name in enumerate(names)
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=5, help="of digits and of wrong labels")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pd.set_option("display.width", 250, "display.max_columns", 20, "display.precision", 4)
    with tempfile.TemporaryDirectory() as temporary:
        draws = []
        for number in range(arguments.draws):
            folder = Path(temporary, str(number))
            study = _study(folder, number)
            draws.append(_rankings(folder, study))
            one = draws[-1]
            aucs = {name: round(_auc(s, one.is_wrong), 4) for name, s in one.scores.items()}
            print(f"draw {number}: {one.is_wrong.sum()} wrong labels, AUC {aucs}")
            if number == 0:
                for table in ("groups", "differences"):
                    shown: Any = pd.read_hdf(folder / "results/groups/held.h5", table)
                    print(shown.to_string(index=False), flush=True)
        rows = _rows(draws)
        print(pd.DataFrame(rows).to_string(index=False), flush=True)
    about = environment("cpu", ("torch", "numpy", "scikit-learn", "cleanlab"))
    print(about)
    if arguments.csv:
        write_csv(arguments.csv, rows, about)


if __name__ == "__main__":
    main()
