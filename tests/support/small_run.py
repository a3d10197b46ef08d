"""A finished run of the small study, its retrained models, and what they must be by plain loops."""

import h5py
import numpy as np
import pandas as pd
import torch
from pipeline import run_stages
from scipy.stats import spearmanr
from torch.utils.data import Subset
from workspace import REPOSITORY

from trak_core.provenance import ids_digest
from trak_core.stages.evaluate_scores import evaluate_scores
from trak_core.stages.retrain_subsets import retrain_subsets
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.draws import random_half, training_seed
from trak_core.study.study import Study

STUDY = REPOSITORY / "tests/studies/small_digits.py"
ARGUMENTS = {"steps": 8}
SEEDS = (0, 1, 2)
N_TARGETS, PROJ_DIM = 5, 40
SUBSETS, REPEATS = 9, 2
PROJECTION = {"kind": "rademacher", "proj_dim": PROJ_DIM, "seed": 0}
COMMON = {"model_output": "image_classification", "study": "digest", "parameter_patterns": None}
SETTINGS = {
    "damping": 2,
    "weighting": "plain",
    "combine": "product_of_averages",
    "loss_weight_power": 0.5,
}


def margin(logits, label):
    p = torch.softmax(logits.double(), -1)[..., label]
    return torch.log(p) - torch.log1p(-p)


class Run:
    """A finished run of the small study, and its retrained models."""

    def __init__(self, folder):
        self.folder = folder
        self.study = Study.load(STUDY)
        self.train = self.study.split("train", None)
        pool = self.study.function("target_ids")().tolist()
        self.pool, self.targets = pool, pool[3 : 3 + N_TARGETS]
        self.checkpoints = {f"c{seed}": folder / f"c{seed}.pt" for seed in SEEDS}
        for seed, path in zip(SEEDS, self.checkpoints.values(), strict=True):
            train_checkpoint(
                checkpoint=path, study=STUDY, arguments={**ARGUMENTS, "seed": seed}, threads=1
            )
        self.scores = self.stages(folder / "run")
        self.retrained = [self.retrain(0, 4), self.retrain(5, SUBSETS - 1)]

    def stages(self, results, damping=2, combine="product_of_averages", power=0.5, dim=PROJ_DIM):
        return run_stages(
            results,
            STUDY,
            self.checkpoints,
            self.targets,
            model_output="image_classification",
            proj_dim=dim,
            damping=damping,
            combine=combine,
            power=power,
        )

    def retrain(self, first, last, folder=None):
        path = (folder or self.folder) / f"{first}-{last}.h5"
        retrain_subsets(
            retrained=path,
            study=STUDY,
            arguments=ARGUMENTS,
            first=first,
            last=last,
            seeds=REPEATS,
            seed=4,
            model_output="image_classification",
            study_digest="digest",
            code="code",
            batch_size=16,
            threads=1,
        )
        return path

    def features(self, split):
        return [self.folder / f"run/features/{c}/{split}.h5" for c in self.checkpoints]

    def matrices(self):
        return [self.folder / f"run/normal_matrix/{c}.h5" for c in self.checkpoints]

    def evaluate(self, path, retrained=None, **changed):
        expected = {
            **COMMON,
            **SETTINGS,
            "projection": PROJECTION,
            "dtype": "float32",
            "targets_digest": ids_digest(self.targets),
            "experiment": "mine",
            "checkpoints": list(self.checkpoints),
        }
        asked = {
            "baselines": [],
            "trak": [],
            "sweep": None,
            "embeddings": [],
            "features": list(
                zip(self.features("train"), self.features("mine"), self.matrices(), strict=True)
            ),
            "expected_retrained": {"study": "digest", "seeds": REPEATS, "seed": 4},
        }
        evaluate_scores(
            evaluation=path,
            scores=self.scores,
            checkpoint_scores=[self.folder / f"run/scores/mine/{c}.h5" for c in self.checkpoints],
            retrained=retrained or self.retrained,
            expected={**expected, **changed.pop("expected", {})},
            expected_embeddings={
                **COMMON,
                "projection": {"kind": "embedding"},
                "dtype": "float32",
                "checkpoints": list(self.checkpoints),
            },
            code="code",
            memory_mb=300,
            **{**asked, **changed},
        )
        return path

    def truth(self):
        """Masks (S, n) and mean outputs (S, m), of models trained here, by hand."""
        if not hasattr(self, "_truth"):
            n = len(self.train.ids)
            masks = np.stack([random_half(n, i, seed=4) for i in range(SUBSETS)])
            split = self.study.split("mine", self.targets)
            images, labels = split.batch(0, N_TARGETS)
            outputs = np.empty((SUBSETS, REPEATS, N_TARGETS))
            for i, mask in enumerate(masks):
                for repeat in range(REPEATS):
                    model = self.study.function("train")(
                        **ARGUMENTS,
                        seed=training_seed(4, i, repeat),
                        data=Subset(self.train.samples, np.flatnonzero(mask).tolist()),
                    ).eval()
                    with torch.no_grad():
                        logits = model(images)
                    outputs[i, repeat] = [
                        margin(x, y).item() for x, y in zip(logits, labels, strict=True)
                    ]
            self._truth = masks.astype(float), outputs
        return self._truth

    def lds(self, scores):
        """Each target's correlation, by scipy in a loop."""
        masks, outputs = self.truth()
        sums, mean = masks @ np.asarray(scores, dtype=float), outputs.mean(axis=1)
        return np.array([spearmanr(sums[:, j], mean[:, j]).statistic for j in range(N_TARGETS)])


def stored(run, key, split="train"):
    for path in run.features(split):
        yield pd.read_hdf(path, key).to_numpy()


def loss_weights(run):
    scores = [run.folder / f"run/scores/mine/{c}.h5" for c in run.checkpoints]
    return [h5py.File(path)["loss_weights"][:].astype(float) for path in scores]


def expected_train(run, **more):
    return {
        **COMMON,
        "projection": PROJECTION,
        "dtype": "float32",
        "split": "train",
        "targets_digest": None,
        "checkpoints": list(run.checkpoints),
        **more,
    }
