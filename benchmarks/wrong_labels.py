"""Are wrong labels found as well as by cleanlab?

    python benchmarks/wrong_labels.py --csv wrong_labels.csv

The study is `studies/annotated_digits.py`, five draws of digits and of wrong labels. The stages of
the pipeline make `suspects` and `groups` in this process: three runs with two checkpoints each, k =
512, the 500 held-out digits as targets. Beside `suspects` stands cleanlab, if it is installed: its
normalized margin of probabilities from five models of the same kind, each trained without the fifth
that it judges; and once more with the held-out digits and their right labels in every training,
because the targets of `suspects` have these too. AUC is the chance that a wrong label ranks before
a right one; `precision` the part of wrong labels among as many first ranks as there are wrong ones.
Intervals are 95 % bootstrap intervals over draws and samples, of what `suspects` has more than the
row, from the same draws. The first draw's scores by annotator are printed too.
"""

import argparse
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import torch
from shared import environment, write_csv
from sklearn.metrics import roc_auc_score
from torch.utils.data import ConcatDataset, Subset

from trak_core.config.specs_from_config import specs_of
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_scores import (
    compute_normal_matrix,
    compute_scores,
    compute_self_influence,
)
from trak_core.stages.sum_groups import sum_groups
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.stages.write_list import write_list

_REPOSITORY = Path(__file__).parents[1]
_RUNS, _FOLDS, _STEPS = 3, 5, 300
_BOOTSTRAP = 1000
_CONFIG = {
    "model_output": "image_classification",
    "training": {"steps": _STEPS, "at": [1, 5]},
    "checkpoints": {f"run{seed}": {"seed": seed} for seed in range(_RUNS)},
    "projection": {"kind": "rademacher", "proj_dim": 512, "seed": 0},
}
_DEFAULTS = {
    "data_files": [],
    "parameters": "all",
    "preconditioner": "none",
    "features_dtype": "float32",
    "scoring": {"damping": 2, "normalize": False, "keep": "full", "top": 20},
    "compute": {"shards": 1, "memory_mb": 1000, "device": "cpu"},
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
    """One draw of digits and wrong labels; a ranking's largest scores mark likely wrong ones."""

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
    """Make the list of suspects by the stages of the pipeline, in this process."""
    path, results = folder / "study.py", folder / "results"
    config = _CONFIG | _DEFAULTS | {"study": str(path)}
    config["experiments"] = {"held": {"targets": list(range(n_held)), "shards": 1}}
    specs = specs_of(config, results)
    scored, features, matrices = [], [], []
    for run in specs.runs:
        files = [results / f"checkpoints/{checkpoint}.pt" for checkpoint in specs.runs[run]]
        train_checkpoint(
            checkpoints=files,
            study_file=path,
            arguments=specs.training_arguments(run),
            times=specs.times(run),
            threads=1,
        )
    job = {"code": "code", "memory_mb": 1000}
    for checkpoint in specs.self_influence.checkpoints:
        both = [results / f"features/{checkpoint}/{split}.h5" for split in ("train", "held")]
        for file in both:
            compute_features(
                features=file,
                checkpoint=results / f"checkpoints/{checkpoint}.pt",
                study_file=path,
                spec=specs.features(checkpoint, file.stem),
                targets=specs.experiments.get(file.stem),
                device="cpu",
                batch_size=100,
                threads=1,
                **job,
            )
        matrix, scores = (results / f"{kind}/{checkpoint}.h5" for kind in ("matrix", "scores/held"))
        own = specs.normal_matrix(checkpoint)
        compute_normal_matrix(normal_matrix=matrix, features=both[0], spec=own, **job)
        compute_scores(
            scores=scores,
            train_path=both[0],
            targets_path=both[1],
            normal_matrix=matrix,
            spec=specs.checkpoint_scores("held", checkpoint),
            keep="full",
            **job,
        )
        scored.append(scores)
        features.append(both[0])
        matrices.append(matrix)
    average, own = results / "scores/held.h5", results / "self_influence.h5"
    average_scores(
        scores=average,
        checkpoint_scores=scored,
        features=[],
        spec=specs.scores("held"),
        defaults=specs.defaults,
        columns=specs.columns,
        top=20,
        study_file=path,
        **job,
    )
    influences = {"features": features, "normal_matrices": matrices, "spec": specs.self_influence}
    compute_self_influence(self_influence=own, **influences, **job)
    listed, groups = results / "lists/suspects.csv", results / "groups/held.h5"
    given = {"scores": average, "self_influence": [own], "spec": specs.scores("held")}
    write_list(listed=listed, **given, kind="suspects", code="code")
    sum_groups(
        groups=groups,
        scores=average,
        checkpoint_scores=scored,
        features=[],
        spec=specs.scores("held"),
        group_by=["annotator"],
        **job,
    )
    return pd.read_csv(listed).set_index("id").sort_index()


def _trained(study: ModuleType, seed: int, data: object) -> torch.nn.Module:
    *_, (_, model) = study.train(_STEPS, seed=seed, data=data)
    return model.eval()


def _cleanlab(study: ModuleType, *, with_held_out: bool) -> np.ndarray:
    """Return cleanlab's scores by models that were trained without the samples they judge."""
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
    """Return the harm of every training sample where all targets' scores have the same length."""
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
