"""Time the default digits study in one process: Attributor, compat and the package ``trak``.

    python benchmarks/in_process.py --rounds 3

Ten small CNNs of config/digits.py are trained for 15 epochs. There are 1,200 training samples and
100 targets, features are float32 with 512 dimensions, and all runs on the CPU with torch's default
number of threads. In turn, each package computes features, normal matrices and scores from the ten
state dicts and tensors in memory. compat and ``trak`` get the training samples in batches. ``trak``
runs with each of the given batch sizes, and ratios are relative to the fastest. The script prints
the minimum of the wall and CPU seconds of each package over all rounds, and the ratios.
"""

import argparse
import runpy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared import environment

from trak_core import Attributor, compat

STUDY = runpy.run_path(str(Path(__file__).parents[1] / "config/digits.py"))
DIM, TARGETS = 512, 100


def _tensors(samples: Any, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = zip(*(samples[i] for i in range(n)), strict=True)
    return torch.stack(inputs), torch.stack(labels).long()


def _trained(n_models: int) -> list[dict[str, torch.Tensor]]:
    states = []
    for seed in range(n_models):
        result = STUDY["train"](seed=seed, epochs=15)
        model = result if isinstance(result, torch.nn.Module) else [*result][-1][1]
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def by_attributor(states: list[Any], train: Any, targets: Any) -> Any:
    """Return scores computed by an Attributor."""
    names = {str(i): state for i, state in enumerate(states)}
    output = "image_classification"
    made = Attributor(STUDY["make_model"], output, names, kind="rademacher", proj_dim=DIM)
    return made.fit(train).score(targets).frame


def by_traker(package: Any, batch: int) -> Callable[..., Any]:
    """Return a function that computes scores by a package's TRAKer, with this batch size."""

    def scores(states: list[Any], train: Any, targets: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            more: dict[str, Any] = {"lambda_reg": 1.0} if package is compat else {}
            traker = package.TRAKer(
                model=STUDY["make_model"](),
                task="image_classification",
                train_set_size=len(train[0]),
                save_dir=folder,
                device="cpu",
                proj_dim=DIM,
                use_half_precision=False,
                logging_level=100,
                **more,
            )
            for i, state in enumerate(states):
                traker.load_checkpoint(state, model_id=i)
                for start in range(0, len(train[0]), batch):
                    part = tuple(tensor[start : start + batch] for tensor in train)
                    traker.featurize(part, num_samples=len(part[0]))
            traker.finalize_features()
            for i, state in enumerate(states):
                traker.start_scoring_checkpoint("asked", state, model_id=i, num_targets=TARGETS)
                traker.score(targets, num_samples=TARGETS)
            return traker.finalize_scores("asked")

    return scores


def main() -> None:
    """Time all packages in turn and print the minimum of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="*", default=[100, 400, 1200])
    asked = parser.parse_args()
    ways: dict[str, Callable[..., Any]] = {"Attributor": by_attributor}
    ways["compat"] = by_traker(compat, 400)
    try:
        import trak
    except ImportError:
        print("trak is not installed")
    else:
        ways |= {f"trak, batches of {size}": by_traker(trak, size) for size in asked.batches}
    print(environment("cpu", ["torch", "numpy", "numba", "traker"]), torch.get_num_threads())
    states = _trained(asked.models)
    train, targets = (
        _tensors(STUDY["train_data"](), 1200),
        _tensors(STUDY["target_data"](), TARGETS),
    )
    taken: dict[str, list[np.ndarray]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            began = time.perf_counter(), time.process_time()
            way(states, train, targets)
            taken[name].append(np.subtract((time.perf_counter(), time.process_time()), began))
    least = {name: np.min(rounds, axis=0) for name, rounds in taken.items()}
    fastest = np.min([v for k, v in least.items() if k.startswith("trak")] or [[np.nan] * 2], 0)
    for name, both in least.items():
        (clock, cpu), (by_clock, by_cpu) = both, both / least["compat"]
        print(f"{name}: {clock:.2f} s, {cpu:.2f} CPU s; of compat's {by_clock:.2f}, {by_cpu:.2f}")
    by_clock, by_cpu = least["Attributor"] / fastest
    print(f"Attributor: {by_clock:.2f} of the seconds of trak's fastest, {by_cpu:.2f} CPU")


if __name__ == "__main__":
    main()
