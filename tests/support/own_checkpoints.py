"""A regression with checkpoints of a user's own."""

import copy

import torch
from workspace import Workspace

OWN = {
    "model_output": "regression",
    "checkpoints": {f"c{i}": f"mine/c{i}.pt" for i in range(3)},
    "experiments": {
        "few": {"targets": ["patient-342", "patient-400"]},
        "one": {"targets": ["patient-350"]},
    },
    "projection": {"proj_dim": 16},
}


def network(seed=0):
    """The study's model."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def save_own_checkpoint(workspace, number, scale=1.0):
    path = workspace.path(f"mine/c{number}.pt")
    path.parent.mkdir(exist_ok=True)
    torch.save({k: v * scale for k, v in network(number).state_dict().items()}, path)
    return path


def own_study(folder, n_checkpoints=3, experiments=("few", "one"), **more):
    """A study of the first checkpoints and some experiments; nothing has run."""
    config = copy.deepcopy({**OWN, **more})
    config["checkpoints"] = {f"c{i}": f"mine/c{i}.pt" for i in range(n_checkpoints)}
    config["experiments"] = {name: config["experiments"][name] for name in experiments}
    study = Workspace.make(folder, "diabetes.py", config)
    for number in range(n_checkpoints):
        save_own_checkpoint(study, number)
    return study
