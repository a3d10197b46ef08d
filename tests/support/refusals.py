"""A study to spoil, and the one error that Snakemake answers with."""

import re

import torch
import yaml
from workspace import Workspace

GOOD = {
    "model_output": "regression",
    "checkpoints": {"c0": "c0.pt"},
    "experiments": {"mine": {"targets": ["patient-342"]}},
}

STUDY = "diabetes.py"


def save_weights(path):
    """A checkpoint that fits the study's model."""
    shapes = {"0.weight": (32, 10), "0.bias": (32,), "2.weight": (1, 32), "2.bias": (1,)}
    torch.save({key: torch.zeros(shape) for key, shape in shapes.items()}, path)


def study_to_spoil(folder):
    workspace = Workspace.make(folder, STUDY, GOOD)
    save_weights(workspace.path("c0.pt"))
    text = workspace.path(STUDY).read_text()
    text = text.replace("x[:342], y[:342]", "x[:342].repeat(10, 1), y[:342].repeat(10)")
    workspace.path("many.py").write_text(text)
    return workspace


def refuse(workspace, config):
    """Try a config, of values or as bytes, and return the output of the refusal."""
    if not isinstance(config, bytes):
        values = {"study": STUDY, **GOOD, **config}
        config = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).encode()
    return workspace.fail("-n", text=config)


def message(output):
    """Return the text of the one error, and make sure that it is all there is, and the end."""
    assert "Traceback" not in output
    assert "Job stats" not in output
    assert "jobid" not in output
    assert '.smk", line' not in output
    _, *found = re.split(r"^Error: ", output, flags=re.M)
    assert len(found) == 1, output
    return " ".join(found[0].split())
