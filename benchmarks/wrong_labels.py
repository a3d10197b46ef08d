"""Are wrong labels found as well as by cleanlab, and are the lists worth acting on?

    python benchmarks/wrong_labels.py --csv wrong_labels.csv

The study is `annotated_digits.py`, five draws of digits and of wrong labels, run by the pipeline as
it is: three runs with two checkpoints each, the 500 held-out digits as targets, `lists`, `groups`
and, on the first draw, `evaluation.lists`. Beside `suspects` stands cleanlab, which must be
installed: its normalized margin of probabilities from five models of the same kind, each trained
without the fifth that it judges, by one run or by the mean of three; and once more with the
held-out digits and their right labels in every training, which the targets of `suspects` have too.
AUC is the chance that a wrong label ranks before a right one; `precision` the part of wrong labels
among as many first ranks as there are wrong ones. Intervals are 95 % bootstrap intervals over draws
and samples, those of differences (`suspects` less the row) from the same draws.

The second table is what becomes of the test digits of three classes, 3, 5 and 8, when models are
trained on 5 % of the training digits alone: those of the list `select` for the held-out digits of
these classes, random ones, and those of the largest mean cosine of embeddings, by ten seeds.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import torch
import yaml
from cleanlab.rank import get_label_quality_scores
from machine import environment, write_csv
from torch.utils.data import ConcatDataset, Subset

from trak_core.evaluation.correlations import auc
from trak_core.evaluation.retrained_lists import mean_interval
from trak_core.study.retraining_draws import training_seed

_REPOSITORY = Path(__file__).parents[1]
_DRAWS, _RUNS, _FOLDS, _SEEDS, _STEPS = 5, 3, 5, 10, 600
_BOOTSTRAP = 1000
_CLASSES, _PART = [3, 5, 8], 0.05
_CONFIG = {
    "study": "study.py",
    "model_output": "image_classification",
    "training": {"steps": _STEPS, "at": [1, 5]},
    "checkpoints": {f"run{seed}": {"seed": seed} for seed in range(_RUNS)},
    "experiments": {
        "held": {"where": "part == 'held'"},
        "few": {"where": f"part == 'held' and label in {_CLASSES}"},
        "test": {"where": "part == 'test'"},
        "test-few": {"where": f"part == 'test' and label in {_CLASSES}"},
    },
    "projection": {"proj_dim": 512},
    "groups": ["annotator"],
    "lists": {"suspects": {"experiment": "held"}, "select": {"experiment": "few"}},
}
_PROOF = {
    "suspects": {"experiment": "test", "fractions": [0.02, 0.05, 0.1, 0.2], "seeds": 5},
    "select": {"experiment": "test-few", "fractions": [_PART], "seeds": _SEEDS},
}


@dataclass(frozen=True)
class Row:
    """One ranking of the training samples: the mean over draws of AUC and precision."""

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
    """One draw of digits and wrong labels: scores by ranking, the likeliest wrong ones largest."""

    is_wrong: np.ndarray
    scores: dict[str, np.ndarray]


def _run(folder: Path, draw: int, cores: int) -> ModuleType:
    """Run the pipeline in a folder, and return its study."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (_REPOSITORY / "benchmarks/annotated_digits.py").read_text()
    (folder / "study.py").write_text(text.replace("DRAW = 0", f"DRAW = {draw}"))
    config = _CONFIG | ({"evaluation": {"lists": _PROOF}} if draw == 0 else {})
    (folder / "study.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(_REPOSITORY / "Snakefile")]
    command += ["--cores", str(cores), "--configfile", "study.yaml", "--quiet", "all"]
    subprocess.run(command, cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location(f"study{draw}", folder / "study.py")
    assert spec is not None
    assert spec.loader is not None
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return study


def _trained(study: ModuleType, seed: int, data: object) -> torch.nn.Module:
    *_, (_, model) = study.train(_STEPS, seed=seed, data=data)
    return model.eval()


def _out_of_sample(study: ModuleType, n_runs: int, *, with_held_out: bool) -> np.ndarray:
    """Return probabilities of every training sample by models that were trained without it."""
    data, held = study.train_data(), Subset(study.target_data(), range(study.N_HELD))
    n = len(data)
    fold = np.random.default_rng(0).permutation(n) % _FOLDS
    probabilities = np.zeros((n, 10))
    for number in range(_FOLDS):
        others, own = (np.flatnonzero(part) for part in (fold != number, fold == number))
        part = Subset(data, others.tolist())
        part = ConcatDataset([part, held]) if with_held_out else part
        for run in range(n_runs):
            model = _trained(study, 100 + number + _FOLDS * run, part)
            with torch.no_grad():
                logits = model(data.tensors[0][own])
            probabilities[own] += logits.softmax(1).double().numpy() / n_runs
    return probabilities


def _cleanlab(study: ModuleType, n_runs: int, *, with_held_out: bool) -> np.ndarray:
    probabilities = _out_of_sample(study, n_runs, with_held_out=with_held_out)
    labels = study.train_data().tensors[1].numpy()
    return -get_label_quality_scores(labels, probabilities, method="normalized_margin")


def _rankings(folder: Path, study: ModuleType) -> Draw:
    listed = pd.read_csv(folder / "results/lists/suspects.csv").set_index("id").sort_index()
    scores = {
        "suspects": listed["harm"].to_numpy(),
        "self-influence": listed["self_influence"].to_numpy(),
        "loss weight": listed["loss_weight"].to_numpy(),
        f"cleanlab, {_FOLDS} trainings": _cleanlab(study, 1, with_held_out=False),
        f"cleanlab, {_FOLDS * _RUNS} trainings": _cleanlab(study, _RUNS, with_held_out=False),
        f"cleanlab, {_FOLDS * _RUNS} trainings with held-out digits": _cleanlab(
            study, _RUNS, with_held_out=True
        ),
    }
    return Draw(study.is_wrong, scores)


def _precision(scores: np.ndarray, is_wrong: np.ndarray) -> float:
    first = np.argsort(-scores, kind="stable")[: int(is_wrong.sum())]
    return float(is_wrong[first].mean())


def _rows(draws: list[Draw]) -> list[Row]:
    """Compare every ranking with `suspects`, by the same bootstrap draws."""
    names = list(draws[0].scores)
    measures: list[Callable[[np.ndarray, np.ndarray], float]] = [auc, _precision]
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
    trainings = [int(name.split()[1]) if name.startswith("cleanlab") else 0 for name in names]
    return [
        Row(
            name,
            trainings[j],
            *whole[:, j],
            *(ours[0, j], low[0, j], high[0, j]),
            *(ours[1, j], low[1, j], high[1, j]),
        )
        for j, name in enumerate(names)
    ]


def _embeddings(folder: Path, images: torch.Tensor, study: ModuleType) -> list[torch.Tensor]:
    """Return what enters the last layer at the end of every run, rows of length 1."""
    rows = []
    for run in range(_RUNS):
        model = study.make_model()
        path = folder / f"results/checkpoints/run{run}-5.pt"
        model.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            rows.append(torch.nn.functional.normalize(model[:-1](images), dim=1))
    return rows


def _selection(folder: Path, study: ModuleType) -> pd.DataFrame:
    """Return accuracy and loss by selection, with paired differences to the list ``select``."""
    data, (images, labels) = study.train_data(), study.target_data().tensors
    parts = np.array(study.target_columns()["part"])
    is_few = np.isin(labels.numpy(), _CLASSES)
    held, test = (np.flatnonzero(is_few & (parts == part)) for part in ("held", "test"))
    both = zip(
        _embeddings(folder, data.tensors[0], study),
        _embeddings(folder, images[held], study),
        strict=True,
    )
    cosines = torch.stack([own @ others.T for own, others in both]).mean(dim=(0, 2)).numpy()
    listed = pd.read_csv(folder / "results/lists/select.csv")["id"].to_numpy()
    size = round(_PART * len(data))
    chosen = {
        "select": lambda draw: listed[:size],
        "random": lambda draw: np.random.default_rng([9, draw]).permutation(len(data))[:size],
        "embedding cosine": lambda draw: np.argsort(-cosines, kind="stable")[:size],
        "random of these classes": lambda draw: np.random.default_rng([9, draw]).permutation(
            np.flatnonzero(np.isin(data.tensors[1].numpy(), _CLASSES))
        )[:size],
    }
    measured: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, choose in chosen.items():
        right, losses = [], []
        for draw in range(_SEEDS):
            part = Subset(data, choose(draw).tolist())
            model = _trained(study, training_seed(0, 0, draw), part)
            with torch.no_grad():
                logits = model(images[test])
            right.append((logits.argmax(1) == labels[test]).double().numpy())
            losses.append(
                torch.nn.functional.cross_entropy(logits, labels[test], reduction="none").numpy()
            )
        measured[name] = np.stack(right), np.stack(losses).astype(float)
    rows = []
    for name, values in measured.items():
        row: dict[str, object] = {"trained on": name}
        pairs = zip(("accuracy", "loss"), measured["select"], values, strict=True)
        for measure, ours, own in pairs:
            low, high = mean_interval(ours - own)
            row |= {measure: own.mean(), f"{measure}: select less this": (ours - own).mean()}
            row |= {f"{measure} from": low, f"{measure} to": high}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--folder", type=Path, help="where runs stay, for a second start")
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pd.set_option("display.width", 250, "display.max_columns", 20, "display.precision", 4)
    with tempfile.TemporaryDirectory() as temporary:
        base = arguments.folder or Path(temporary)
        draws = []
        for number in range(_DRAWS):
            folder = base / str(number)
            study = _run(folder, number, arguments.cores)
            draws.append(_rankings(folder, study))
            groups = pd.read_hdf(folder / "results/groups/held.h5", "groups")
            print(f"draw {number}: {draws[-1].is_wrong.sum()} wrong labels; scores by annotator")
            print(groups.to_string(index=False), flush=True)
        first = base / "0"
        print(pd.read_hdf(first / "results/groups/held.h5", "differences").to_string(index=False))
        rows = _rows(draws)
        print(pd.DataFrame(rows).to_string(index=False))
        for kind in _PROOF:
            proof = pd.read_hdf(first / f"results/proof/{kind}.h5", "summary")
            print(f"proof of {kind}")
            print(proof.to_string(index=False))
        spec = importlib.util.spec_from_file_location("study0", first / "study.py")
        assert spec is not None
        assert spec.loader is not None
        study = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(study)
        print(_selection(first, study).to_string(index=False))
    about = environment("cpu", ("torch", "numpy", "scikit-learn", "cleanlab"))
    print(about)
    if arguments.csv:
        write_csv(arguments.csv, rows, about)


if __name__ == "__main__":
    main()
