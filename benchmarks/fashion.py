"""Compare scores on Fashion-MNIST, in the settings that dattri and GraSS use for MNIST.

    python benchmarks/fashion.py --data /usr/share/datasets/fashion-mnist --folder f --setting mlp

The data are the first 5,000 training images and the first 500 test images of Debian's package
dataset-fashion-mnist. Setting ``lr`` is a linear layer, trained by SGD with learning rate 0.01 and
batches of 32 for 20 epochs. ``mlp`` is a network 784-128-64-10 with dropout 0.1, trained with
momentum 0.9 and batches of 64 for 50 epochs (dattri, Deng et al., NeurIPS 2024, and GraSS, Hu et
al., 2025).

The linear datamodeling score (LDS) of a method is the Spearman correlation, over 100 random halves
of the training images, between the sum of a test image's scores over the half and the mean log-odds
of its label under three networks trained on the half, averaged over test images. Intervals are 95 %
bootstrap intervals over halves and images. Differences from the first row are paired.

The result of every training and every method is stored in a file, so a second start continues. Each
method runs in a separate process with one thread, which reports its CPU seconds and its peak
memory. ``--peers`` names a Python that has the other packages (benchmarks/fashion_rivals.py).
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import environment, write_csv
from torch import Tensor, nn

N_TRAIN, N_TARGETS, N_HALVES, N_TRUTH_SEEDS = 5000, 500, 100, 3
N_HALF_CHECKPOINTS, N_RUNS = 50, 10
_MEAN, _DEVIATION = 0.2860, 0.3530  # of pixels
_PACKAGES = "torch", "numpy", "traker", "dattri", "kronfluence", "captum"


@dataclass(frozen=True)
class Setting:
    """A network and its training."""

    make_model: Callable[[], nn.Module]
    batch_size: int
    epochs: int
    momentum: float


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


SETTINGS = {
    "lr": Setting(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), 32, 20, 0.0),
    "mlp": Setting(_mlp, 64, 50, 0.9),
}


@dataclass(frozen=True)
class Row:
    """The LDS of one method, with its time and memory."""

    method: str
    checkpoints: int
    lds: float
    low: float
    high: float
    behind: float
    behind_low: float
    behind_high: float
    seconds: float
    peak_mb: float


def images(folder: Path, split: str, n: int) -> tuple[Tensor, Tensor]:
    """Return the first n normalized images (n, 1, 28, 28) and labels (n,) of a split."""

    def read(name: str, offset: int) -> np.ndarray:
        content = gzip.decompress((folder / f"{split}-{name}-ubyte.gz").read_bytes())
        return np.frombuffer(content, np.uint8, offset=offset)

    pixels = read("images-idx3", 16).reshape(-1, 1, 28, 28)[:n]
    x = (torch.tensor(pixels, dtype=torch.float32) / 255 - _MEAN) / _DEVIATION
    return x, torch.tensor(read("labels-idx1", 8)[:n].astype(np.int64))


def train(
    setting: Setting, data: tuple[Tensor, Tensor], seed: int, keep: tuple[int, ...] = ()
) -> dict[int, dict[str, Tensor]]:
    """Train a network; return its weights after the epochs in ``keep`` and the last epoch."""
    torch.manual_seed(seed)
    model, (x, y) = setting.make_model(), data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=setting.momentum)
    kept = {}
    for epoch in range(1, setting.epochs + 1):
        for batch in torch.randperm(len(x)).split(setting.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch in (*keep, setting.epochs):
            kept[epoch] = {name: value.clone() for name, value in model.state_dict().items()}
    return kept


def log_odds(model: nn.Module, x: Tensor, y: Tensor) -> np.ndarray:
    """Return the log-odds of the labels, (n,)."""
    with torch.no_grad():
        log_p = model.eval()(x).double().log_softmax(dim=1)
    own = log_p.gather(1, y[:, None])[:, 0]
    others = log_p.scatter(1, y[:, None], -torch.inf).logsumexp(dim=1)
    return (own - others).numpy()


def halves(n: int, count: int, seed: int) -> np.ndarray:
    """Return masks (count, n) of random halves."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n) < n // 2 for _ in range(count)])


def make_checkpoints(
    setting: Setting, data: tuple[Tensor, Tensor], folder: Path
) -> Mapping[str, list[str]]:
    """Run the missing trainings; return checkpoints of ends, of halves and along runs."""
    folder.mkdir(exist_ok=True)
    early = setting.epochs // 5
    for seed in range(N_RUNS):
        if not (folder / f"run{seed}-{setting.epochs}.pt").exists():
            for epoch, state in train(setting, data, seed, (early,)).items():
                torch.save(state, folder / f"run{seed}-{epoch}.pt")
    for i, mask in enumerate(halves(len(data[0]), N_HALF_CHECKPOINTS, seed=1)):
        if not (path := folder / f"half{i}.pt").exists():
            part = data[0][kept := torch.from_numpy(mask)], data[1][kept]
            torch.save(train(setting, part, 1000 + i)[setting.epochs], path)
    ends = [str(folder / f"run{seed}-{setting.epochs}.pt") for seed in range(N_RUNS)]
    return {
        "runs": ends,
        "halves": [str(folder / f"half{i}.pt") for i in range(N_HALF_CHECKPOINTS)],
        "along": [
            str(folder / f"run{s}-{e}.pt") for s in range(N_RUNS) for e in (early, setting.epochs)
        ],
    }


def ground_truth(
    setting: Setting,
    data: tuple[Tensor, Tensor],
    targets: tuple[Tensor, Tensor],
    folder: Path,
    n_halves: int = N_HALVES,
    n_seeds: int = N_TRUTH_SEEDS,
) -> tuple[np.ndarray, np.ndarray]:
    """Return masks (halves, n) and log-odds (seeds, halves, m) of networks retrained on halves."""
    folder.mkdir(exist_ok=True)
    masks = halves(len(data[0]), n_halves, seed=0)
    outputs = np.empty((n_seeds, n_halves, len(targets[0])))
    for i, mask in enumerate(masks):
        part = data[0][kept := torch.from_numpy(mask)], data[1][kept]
        for seed in range(n_seeds):
            path = folder / f"{i}-{seed}.npy"
            if not path.exists():
                model = setting.make_model()
                model.load_state_dict(train(setting, part, 10_000 + 100 * seed + i)[setting.epochs])
                np.save(path, log_odds(model, *targets))
            outputs[seed, i] = np.load(path)
    return masks.astype(np.float64), outputs


Method = tuple[int, Callable[..., np.ndarray]]  # the number of checkpoints and the scores


def _ours(checkpoints: str, count: int, **settings: Any) -> Method:
    def scores(setting: Setting, paths: Mapping[str, list[str]], *splits: Any) -> np.ndarray:
        from trak_core import Attributor

        named: Any = {Path(path).stem: path for path in paths[checkpoints][:count]}
        if checkpoints == "along":
            named = {
                name: {"path": path, "run": name.split("-")[0], "at": int(name.split("-")[1])}
                for name, path in named.items()
            }
        model = setting.make_model()
        attributor = Attributor(model, "image_classification", named, **settings)
        return attributor.fit(splits[0]).score(splits[1]).frame.to_numpy(np.float32)

    return count, scores


def _gradient_products(*, normalize: bool) -> Method:
    def scores(setting: Setting, paths: Mapping[str, list[str]], *splits: Any) -> np.ndarray:
        model = setting.make_model().eval()
        model.load_state_dict(torch.load(paths["runs"][0]))
        parameters = dict(model.named_parameters())

        def loss(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
            logits = torch.func.functional_call(model, parameters, (x[None],))
            return nn.functional.cross_entropy(logits, y[None])

        of_samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        rows = []
        for x, y in splits:
            gradients = of_samples(parameters, x, y).values()
            rows.append(torch.cat([g.flatten(1) for g in gradients], dim=1).detach())
            if normalize:
                rows[-1] = nn.functional.normalize(rows[-1], dim=1)
        return (rows[0] @ rows[1].T).numpy()

    return 1, scores


def _random(setting: Setting, paths: Mapping[str, list[str]], *splits: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.standard_normal((len(splits[0][0]), len(splits[1][0])), np.float32)


_EXACT: dict[str, Any] = {"projection": "exact", "memory_mb": 4000}
# All methods are compared with the first.
METHODS: dict[str, Method] = {
    "ours, 10 runs": _ours("runs", 10),
    "ours, 1 run": _ours("runs", 1),
    "ours, 1 half": _ours("halves", 1),
    "ours, 10 halves": _ours("halves", 10),
    "ours, 50 halves": _ours("halves", 50),
    "ours, along 10 runs": _ours("along", 20),
    "ours, 10 runs, k = 512": _ours("runs", 10, proj_dim=512),
    "ours, 10 runs, k = 4096": _ours("runs", 10, proj_dim=4096),
    "ours, 1 run, exact": _ours("runs", 1, **_EXACT),
    "ours, 10 runs, exact": _ours("runs", 10, **_EXACT),
    "ours, 10 halves, exact": _ours("halves", 10, **_EXACT),
    "ours, 1 run, exact, 1 drawn label": _ours(
        *("runs", 1), projection="exact", label_draws=1, memory_mb=6000
    ),
    "ours, 1 run, 1 drawn label": _ours("runs", 1, label_draws=1),
    "ours, 1 run, 4 drawn labels": _ours("runs", 1, label_draws=4),
    "ours, 10 runs, 1 drawn label": _ours("runs", 10, label_draws=1),
    "ours, 10 runs, 4 drawn labels": _ours("runs", 10, label_draws=4),
    "ours, along 10 runs, 1 drawn label": _ours("along", 20, label_draws=1),
    "ours, along 10 runs, 4 drawn labels, damping 1": _ours(
        *("along", 20), label_draws=4, damping=1
    ),
    "gradient dot": _gradient_products(normalize=False),
    "gradient cosine": _gradient_products(normalize=True),
    "random": (0, _random),
}


def compute(method: Callable[[], np.ndarray], path: Path) -> None:
    """Write a method's scores (n, m), and the CPU seconds and peak memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.process_time()
    scores = method()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    about = {"seconds": seconds, "peak_mb": peak - before}
    with path.with_suffix(".part").open("wb") as file:
        np.savez(file, scores=scores, about=json.dumps(about))
    path.with_suffix(".part").rename(path)


def file_of(folder: Path, method: str) -> Path:
    """Return the file of a method's scores."""
    return folder / "scores" / f"{method.replace(' ', '_')}.npz"


def table(
    masks: np.ndarray, outputs: np.ndarray, folder: Path, checkpoints: Mapping[str, int]
) -> list[Row]:
    """Return a row for each method that has scores."""
    from trak_core.evaluation.intervals import interval
    from trak_core.evaluation.lds import bootstrap, noise_ceiling, rank_correlations

    names = [name for name in checkpoints if file_of(folder, name).exists()]
    sums, about = [], []
    for name in names:
        with np.load(file_of(folder, name)) as file:
            sums.append(masks @ file["scores"].astype(np.float64))
            about.append(json.loads(str(file["about"])))
    drawn = bootstrap(sums, outputs)[:, : len(names)]
    low, high = interval(drawn, axis=0)
    behind_low, behind_high = interval(drawn[:, :1] - drawn, axis=0)
    mean = outputs.mean(axis=0)
    lds = [float(rank_correlations(values, mean).mean()) for values in sums]
    print(f"noise ceiling {noise_ceiling(outputs).mean():.3f}")
    return [
        Row(
            *(name, checkpoints[name], lds[i], float(low[i]), float(high[i]), lds[0] - lds[i]),
            *(float(behind_low[i]), float(behind_high[i])),
            *(about[i]["seconds"], about[i]["peak_mb"]),
        )
        for i, name in enumerate(names)
    ]


def main() -> None:
    """Train, compute the scores of every method, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--only", help="compute this method's scores in this process")
    parser.add_argument("--csv", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    setting, folder = SETTINGS[asked.setting], asked.folder
    (folder / "scores").mkdir(parents=True, exist_ok=True)
    train_split = images(asked.data, "train", N_TRAIN)
    target_split = images(asked.data, "t10k", N_TARGETS)
    paths = make_checkpoints(setting, train_split, folder / "checkpoints")
    if asked.only:
        _, method = METHODS[asked.only]
        compute(
            lambda: method(setting, paths, train_split, target_split), file_of(folder, asked.only)
        )
        return
    masks, outputs = ground_truth(setting, train_split, target_split, folder / "truth")
    own = [*sys.argv[1:], "--only"]
    commands = {name: [sys.executable, __file__, *own, name] for name in METHODS}
    counts = {name: count for name, (count, _) in METHODS.items()}
    if asked.peers:
        script = str(Path(__file__).with_name("fashion_rivals.py"))
        listed = subprocess.run([asked.peers, script, "--list"], check=True, capture_output=True)
        for name, count in json.loads(listed.stdout).items():
            counts[name] = count
            commands[name] = [str(asked.peers), script, *own, name]
    for name, command in commands.items():
        if not file_of(folder, name).exists():
            print(name, file=sys.stderr, flush=True)
            subprocess.run(command, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = table(masks, outputs, folder, counts)
    about = environment("cpu", _PACKAGES)
    print(json.dumps(about))
    for row in rows:
        print(
            f"{row.method:40} {row.lds:.3f} ({row.low:.3f} to {row.high:.3f})  behind "
            f"{row.behind:+.3f} ({row.behind_low:+.3f} to {row.behind_high:+.3f})  "
            f"{row.seconds:7.1f} s {row.peak_mb:6.0f} MB"
        )
    if asked.csv:
        write_csv(asked.csv, rows, about)


if __name__ == "__main__":
    main()
