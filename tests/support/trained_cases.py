"""Two small studies with trained checkpoints, and what their scores must be."""

from pathlib import Path

import numpy as np
import oracle
import torch
from pipeline import run_stages
from torch import nn

from trak_core.study.study import Study

STUDIES = Path(__file__).parents[1] / "studies"
N_TARGETS = 7


def trained_diabetes(study, seed):
    torch.manual_seed(seed)
    model = study.make_model()
    data, labels = study.module.train_data().tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = nn.functional.mse_loss(model(data).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class Case:
    """A study with three trained checkpoints on disk."""

    def __init__(self, name, folder):
        self.path = STUDIES / f"{name}.py"
        study = Study.load(self.path)
        digits = name == "small_digits"
        self.output = "image_classification" if digits else "regression"
        self.train = study.split("train", None)
        self.targets = list(study.function("target_ids")()[:N_TARGETS])
        self.targets = [t.item() if hasattr(t, "item") else t for t in self.targets]
        self.target_split = study.split("mine", self.targets)
        self.models, self.checkpoints, self._parts = {}, {}, {}
        for seed in range(3):
            if digits:
                model = study.function("train")(seed=seed, steps=15)
            else:
                model = trained_diabetes(study, seed)
            self.models[f"c{seed}"] = model
            self.checkpoints[f"c{seed}"] = folder / f"{name}-{seed}.pt"
            torch.save(model.state_dict(), self.checkpoints[f"c{seed}"])

    def stages(self, results, n_checkpoints=3, **settings):
        checkpoints = dict(list(self.checkpoints.items())[:n_checkpoints])
        return run_stages(
            results, self.path, checkpoints, self.targets, model_output=self.output, **settings
        )

    def expected(self, n_checkpoints=3, proj_dim=None, n_train=None, **settings):
        """Scores in float64; gradients are taken once, since settings of scoring leave them be."""
        key = proj_dim, n_train
        if key not in self._parts:
            self._parts[key] = oracle.parts(
                self.models,
                [self.train.samples[i] for i in range(n_train or len(self.train.ids))],
                [self.target_split.samples[i] for i in range(N_TARGETS)],
                output=self.output,
                proj_dim=proj_dim,
            )
        parts = self._parts[key][:n_checkpoints]
        return oracle.scores_of(parts, output=self.output, **settings)


def assert_close(found, expected, relative):
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < relative, error
