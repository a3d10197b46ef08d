"""The smallest study, with two random checkpoints, for ``pipeline``."""

import torch
from pipeline import scores_spec

STUDY = """
import torch
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 3, generator=generator), torch.randn(40, generator=generator)


def make_model():
    return torch.nn.Linear(3, 1)


def train_data():
    return TensorDataset(x[:30], y[:30])


def target_data():
    return TensorDataset(x[30:], y[30:])


def target_ids():
    return [f"target-{i}" for i in range(10)]
"""

TARGETS = ["target-3", "target-1", "target-7"]
SPEC = scores_spec(["c0", "c1"], TARGETS, model_output="regression")


def with_two_checkpoints(folder):
    """Write the study and its checkpoints; return the arguments of ``pipeline.run_stages``."""
    study = folder / "study.py"
    study.write_text(STUDY)
    checkpoints = {}
    for name in ("c0", "c1"):
        torch.manual_seed(len(checkpoints))
        checkpoints[name] = folder / f"{name}.pt"
        torch.save(torch.nn.Linear(3, 1).state_dict(), checkpoints[name])
    return study, checkpoints, TARGETS
