"""Two small studies, one with trained checkpoints, and their expected scores."""

from functools import cache, cached_property
from pathlib import Path

import numpy as np
import oracle
import torch
from own_checkpoints import network
from pipeline import run_stages

from trak_core.study.study import Study

STUDIES = Path(__file__).parents[1] / "studies"
N_TARGETS = 7


class Case:
    """A study with three checkpoints on disk, which are trained for images."""

    def __init__(self, name, folder):
        self.folder, self.path = folder, STUDIES / f"{name}.py"
        study = Study.load(self.path)
        digits = name == "small_digits"
        self.output = "image_classification" if digits else "regression"
        self.train = study.split("train", None)
        self.targets = list(study.function("target_ids")()[:N_TARGETS])
        self.targets = [t.item() if hasattr(t, "item") else t for t in self.targets]
        self.target_split = study.split("mine", self.targets)
        self.models, self.checkpoints = {}, {}
        for seed in range(3):
            model = study.function("train")(seed=seed, steps=15) if digits else network(seed)
            self.models[f"c{seed}"] = model
            self.checkpoints[f"c{seed}"] = folder / f"{name}-{seed}.pt"
            torch.save(model.state_dict(), self.checkpoints[f"c{seed}"])
        self.features, self.parts = cache(self._features), cache(self._parts)

    def stages(self, results, n_checkpoints=3, *, proj_dim=None, **settings):
        """Run the stages for the first checkpoints. Settings replace those of the case."""
        given = {
            "study": self.path,
            "checkpoints": dict(list(self.checkpoints.items())[:n_checkpoints]),
            "targets": self.targets,
            "model_output": self.output,
        } | settings
        return run_stages(results, proj_dim=proj_dim, **given)

    def spoiled(self, path, change):
        """Save the first checkpoint with changed weights, and return the checkpoints of a run."""
        state = {key: value.clone() for key, value in self.models["c0"].state_dict().items()}
        change(state)
        torch.save(state, path)
        return {"bad": path}

    def _features(self, proj_dim=None):
        """Return a run with features, or with Gramians if there is no proj_dim."""
        results = self.folder / f"{self.path.stem}-{proj_dim}"
        self.stages(results, proj_dim=proj_dim)
        return results

    def samples(self, split):
        return [split.samples[i] for i in range(len(split.ids))]

    @cached_property
    def jacobians(self):
        """``oracle.jacobian`` of training samples and of targets, by checkpoint."""
        splits = self.train, self.target_split
        return {
            checkpoint: [oracle.jacobian(model, self.samples(s), self.output) for s in splits]
            for checkpoint, model in self.models.items()
        }

    def _parts(self, proj_dim, n_train):
        jacobians = {
            checkpoint: ([values[:n_train] for values in train], targets)
            for checkpoint, (train, targets) in self.jacobians.items()
        }
        return oracle.parts(jacobians, proj_dim)

    def expected(self, n_checkpoints=3, proj_dim=None, n_train=None, **settings):
        """Return scores in float64."""
        parts = self.parts(proj_dim, n_train)[:n_checkpoints]
        return oracle.scores(parts, output=self.output, **settings)


def assert_close(values, expected, relative):
    error = np.abs(np.asarray(values) - expected).max() / np.abs(expected).max()
    assert error < relative, error
