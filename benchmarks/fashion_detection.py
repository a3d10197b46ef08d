"""Find planted samples among all 60,000 images of Fashion-MNIST with the scores of a LeNet.

    python benchmarks/fashion_detection.py --data /usr/share/datasets/fashion-mnist --folder f

The label of 6,000 training images is changed to a random other class, and a white square is drawn
on 1,200 images of class 0. Three LeNets (LeCun et al., 1998; 61,706 parameters) are trained on
them by SGD with momentum, for 10 epochs. The metrics are those of quanda (Bareeva et al., 2024):

- ``class``: the fraction of targets for which the training image with the largest score has the
  target's label. Targets are test images that the first network classifies correctly.
- ``shortcut``: the average precision with which a target's scores rank the training images with a
  square. Targets are test images of other classes that the network assigns to class 0 because of a
  square. Scores explain class 0.
- ``wrong labels``: the area under the curve of the fraction of wrong labels that are among the
  training images with the largest self-influence, by the fraction of images. A random order has
  0.5.
- ``LDS``: the linear datamodeling score of the targets of ``class`` over 40 random halves of the
  training images, as in benchmarks/fashion.py.

Intervals are 95 % bootstrap intervals over targets, and for the LDS over halves and targets. The
result of every training and every method is stored in a file, so a second start continues.
``--peers`` names a Python with torch, traker and captum.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fashion import Setting, compute, file_of, ground_truth, images, log_odds, train
from fashion_rivals import traker
from shared import environment
from torch import Tensor, nn
from torch.utils.data import TensorDataset

N_TRAIN, N_TARGETS, N_WRONG, N_MARKED, N_RUNS, N_DRAWS = 60_000, 500, 6000, 1200, 3, 1000
N_HALVES, N_SEEDS = 40, 2
_BATCH = 250
_PACKAGES = "torch", "numpy", "traker", "captum"
Split = tuple[Tensor, Tensor]
# Scores (n, m) with the self-influence (n,) as a last column, or with NaN if a method has none.
Method = Callable[[list[str], Split, Split], np.ndarray]


class LeNet(nn.Sequential):
    """LeNet-5 with ReLU and max pooling."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )


SETTING = Setting(LeNet, 64, 10, 0.9)


def _marked(x: Tensor) -> Tensor:
    """Return images with a white square of 5 x 5 pixels in a corner."""
    x = x.clone()
    x[:, :, 1:6, 1:6] = x.max()
    return x


def planted(data: Path) -> tuple[Split, np.ndarray, np.ndarray]:
    """Return the training images, a mask of wrong labels, and a mask of images with a square."""
    x, y = images(data, "train", N_TRAIN)
    rng = np.random.default_rng(0)
    marked = rng.permutation(np.flatnonzero(y == 0))[:N_MARKED]
    wrong = rng.permutation(np.setdiff1d(np.arange(N_TRAIN), marked))[:N_WRONG]
    x[marked] = _marked(x[marked])
    y[wrong] = (y[wrong] + torch.from_numpy(rng.integers(1, 10, N_WRONG))) % 10
    is_wrong, is_marked = np.zeros((2, N_TRAIN), bool)
    is_wrong[wrong] = is_marked[marked] = True
    return (x, y), is_wrong, is_marked


def targets_of(data: Path, path: str) -> tuple[Split, int]:
    """Return targets for ``class``, then for ``shortcut``, and the number of the former."""
    x, y = images(data, "t10k", 10_000)
    model = _loaded(path)
    with torch.no_grad():
        plain, marked = model(x).argmax(1), model(_marked(x)).argmax(1)
    right = (plain == y).nonzero()[:N_TARGETS, 0]
    fooled = ((y != 0) & (plain != 0) & (marked == 0)).nonzero()[:N_TARGETS, 0]
    labels = torch.cat([y[right], torch.zeros_like(fooled)])
    return (torch.cat([x[right], _marked(x[fooled])]), labels), len(right)


def _loaded(path: str) -> LeNet:
    model = LeNet().eval()
    model.load_state_dict(torch.load(path))
    return model


def _with_self_influence(scores: Any, own: Any = None) -> np.ndarray:
    scores = np.asarray(scores, np.float32)
    last = np.full(len(scores), np.nan) if own is None else np.asarray(own)
    return np.column_stack([scores, last.astype(np.float32)])


def ours(count: int, **settings: Any) -> Method:
    """Return this package's scores and self-influence."""

    def scores(paths: list[str], train: Split, targets: Split) -> np.ndarray:
        from trak_core import Attributor

        named = {Path(path).stem: path for path in paths[:count]}
        fitted = Attributor(LeNet(), "image_classification", named, **settings).fit(train)
        own = fitted.self_influence()["self_influence"]
        return _with_self_influence(fitted.score(targets).frame, own)

    return scores


def trak_package(count: int, proj_dim: int) -> Method:
    """Return the scores of TRAK's package, as in benchmarks/fashion_rivals.py."""

    def scores(paths: list[str], train: Split, targets: Split) -> np.ndarray:
        _, compute_scores = traker("runs", count, proj_dim)
        return _with_self_influence(compute_scores(SETTING, {"runs": paths}, (train, targets)))

    return scores


def captum_tracin(name: str, **settings: Any) -> Method:
    """Return captum's TracInCP or TracInCPFast with one checkpoint."""

    def scores(paths: list[str], train: Split, targets: Split) -> np.ndarray:
        model = _loaded(paths[0])

        def load(model: nn.Module, path: str) -> float:
            model.load_state_dict(torch.load(path))
            return 1.0

        if name == "TracInCPFast":
            settings["final_fc_layer"] = model[-1]
        influence = getattr(import_module("captum.influence"), name)(
            model=model,
            train_dataset=TensorDataset(*train),
            checkpoints=paths[:1],
            checkpoints_load_func=load,
            loss_fn=nn.CrossEntropyLoss(reduction="sum"),
            batch_size=_BATCH,
            **settings,
        )
        products = influence.influence(targets).numpy().T
        return _with_self_influence(products, influence.self_influence().numpy())

    return scores


def cosine_of_activations(paths: list[str], train: Split, targets: Split) -> np.ndarray:
    """Return the cosine similarity of the last hidden layer's activations."""
    model = nn.Sequential(*list(_loaded(paths[0]))[:-1])
    with torch.no_grad():
        a, b = (nn.functional.normalize(model(x), dim=1) for x, _ in (train, targets))
    return _with_self_influence(a @ b.T)


def random(_: list[str], train: Split, targets: Split) -> np.ndarray:
    """Return random scores and self-influence."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((len(train[0]), len(targets[0]) + 1), np.float32)


METHODS: dict[str, Method] = {
    "ours, 1 run": ours(1),
    "ours, 3 runs": ours(3),
    "ours, 1 run, k = 4096": ours(1, proj_dim=4096),
    "ours, 1 run, loss weights to the power 0.01": ours(1, loss_weight_power=0.01),
    "ours, 3 runs, loss weights to the power 0.01": ours(3, loss_weight_power=0.01),
    "cosine of activations": cosine_of_activations,
    "random": random,
}
PEERS: dict[str, Method] = {
    "TRAK 0.3.2, 1 run, k = 1024": trak_package(1, 1024),
    "captum TracInCP, 1 run": captum_tracin("TracInCP", sample_wise_grads_per_batch=True),
    "captum TracInCPFast, 1 run": captum_tracin("TracInCPFast"),
}


def average_precisions(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """Return the average precision of each column of scores (n, m) in ranking relevant rows."""
    hits = relevant[np.argsort(-scores, axis=0)]
    precision = hits.cumsum(axis=0) / np.arange(1, len(hits) + 1)[:, None]
    return (precision * hits).sum(axis=0) / relevant.sum()


def area(ranked_by: np.ndarray, relevant: np.ndarray) -> float:
    """Return the area under the curve of the fraction of relevant samples ranked first, by rank."""
    return float((relevant[np.argsort(-ranked_by)].cumsum() / relevant.sum()).mean())


def _interval(values: np.ndarray) -> str:
    drawn = np.random.default_rng(0).choice(values, (N_DRAWS, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def _lds(scores: np.ndarray, masks: np.ndarray, outputs: np.ndarray) -> str:
    from trak_core.evaluation.intervals import interval
    from trak_core.evaluation.lds import bootstrap, rank_correlations

    sums = masks @ scores.astype(np.float64)
    low, high = interval(bootstrap([sums], outputs)[:, 0], axis=0)
    mean = rank_correlations(sums, outputs.mean(axis=0)).mean()
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Train the networks, compute the scores of every method, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--only", help="compute the scores of this method, in this process")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = asked.folder
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    train_split, is_wrong, is_marked = planted(asked.data)
    paths = [str(folder / f"run{seed}.pt") for seed in range(N_RUNS)]
    for seed, path in enumerate(paths):
        if not Path(path).exists():
            torch.save(train(SETTING, train_split, seed)[SETTING.epochs], path)
    targets, n_right = targets_of(asked.data, paths[0])
    if asked.only:
        method = (METHODS | PEERS)[asked.only]
        compute(lambda: method(paths, train_split, targets), file_of(folder, asked.only))
        return
    from trak_core.evaluation.lds import noise_ceiling

    of_class = targets[0][:n_right], targets[1][:n_right]
    masks, outputs = ground_truth(
        SETTING, train_split, of_class, folder / "truth", N_HALVES, N_SEEDS
    )
    pythons = dict.fromkeys(METHODS, sys.executable)
    pythons |= {name: str(asked.peers) for name in PEERS if asked.peers}
    print(json.dumps(environment("cpu", _PACKAGES)))
    print(f"{n_right} targets for class, {len(targets[0]) - n_right} for shortcut")
    print(f"noise ceiling of the LDS {noise_ceiling(outputs).mean():.3f}")
    f = log_odds(_loaded(paths[0]), *train_split)
    print(f"wrong labels by the lowest log-odds {area(-f, is_wrong):.3f}")
    for name, python in pythons.items():
        if not (file := file_of(folder, name)).exists():
            command = [python, __file__, *sys.argv[1:], "--only", name]
            subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if not file.exists():
            continue
        with np.load(file) as stored:
            scores, about = stored["scores"], json.loads(str(stored["about"]))
        first = train_split[1][scores[:, :n_right].argmax(axis=0)]
        same_class = (first == targets[1][:n_right]).double().numpy()
        precisions = average_precisions(scores[:, n_right:-1], is_marked)
        wrong = "" if np.isnan(scores[:, -1]).any() else f"{area(scores[:, -1], is_wrong):.3f}"
        print(
            f"{name:45} class {_interval(same_class)}  shortcut {_interval(precisions)}  "
            f"LDS {_lds(scores[:, :n_right], masks, outputs)}  "
            f"wrong labels {wrong:5}  {about['seconds']:7.1f} s {about['peak_mb']:6.0f} MB"
        )


if __name__ == "__main__":
    main()
