"""Run the small study once, retrain its models, and compute their outputs by plain loops."""

from dataclasses import replace

import h5py
import numpy as np
import pandas as pd
import torch
from pipeline import run_stages, scores_spec
from scipy.stats import spearmanr
from torch.utils.data import Subset
from workspace import REPOSITORY

from trak_core.settings import RetrainedSpec
from trak_core.stages.compute_outputs import compute_embeddings
from trak_core.stages.evaluate_scores import evaluate_scores
from trak_core.stages.retrain import retrain
from trak_core.stages.train_checkpoint import train_checkpoint
from trak_core.study.retraining_draws import random_subset, training_seed
from trak_core.study.study import Study

STUDY = REPOSITORY / "tests/studies/small_digits.py"
ARGUMENTS = {"steps": 8}
SEEDS = (0, 1, 2)
N_TARGETS, PROJ_DIM = 5, 40
SUBSETS, REPEATS = 9, 2
OUTPUT = "image_classification"
RETRAINED = RetrainedSpec(
    subsets="random",
    arguments=ARGUMENTS,
    model_output=OUTPUT,
    study_digest="digest",
    seeds=REPEATS,
    seed=4,
)


def margins(logits, labels):
    """Return the log-odds of each label, float64."""
    p = logits.double().softmax(-1).gather(-1, labels[:, None])[:, 0]
    return (torch.log(p) - torch.log1p(-p)).numpy()


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
                checkpoints=[path],
                study_file=STUDY,
                arguments={**ARGUMENTS, "seed": seed},
                times=None,
                threads=1,
            )
        self.scores = self.features_of(PROJ_DIM) / "scores/mine.h5"
        self.retrained = [self.retrain(0, 4), self.retrain(5, SUBSETS - 1)]

    def stages(
        self, results, damping=2, combine="product_of_averages", power=0.5, dim=PROJ_DIM, **settings
    ):
        study = STUDY, self.checkpoints, self.targets
        settings |= {"damping": damping, "combine": combine, "power": power, "proj_dim": dim}
        return run_stages(
            results, *study, model_output=OUTPUT, made=self.features_of(dim), **settings
        )

    def features_of(self, dim):
        """Return the folder of a run with ``dim`` dimensions. Scoring does not change features."""
        results = self.folder / ("run" if dim == PROJ_DIM else f"run-{dim}")
        if not results.exists():
            study = STUDY, self.checkpoints, self.targets
            run_stages(results, *study, model_output=OUTPUT, proj_dim=dim, power=0.5)
        return results

    def with_checkpoints(self, *names):
        """Return this run with only some of its checkpoints."""
        run = Run.__new__(Run)
        run.__dict__ |= {**vars(self), "checkpoints": {c: self.checkpoints[c] for c in names}}
        return run

    def retrain(self, first, last, folder=None):
        path = (folder or self.folder) / f"{first}-{last}.h5"
        retrain(
            retrained=path,
            study_file=STUDY,
            spec=RETRAINED,
            first=first,
            last=last,
            code="code",
            batch_size=16,
            threads=1,
        )
        return path

    def features(self, split):
        return [self.folder / f"run/features/{c}/{split}.h5" for c in self.checkpoints]

    @property
    def spec(self):
        sizes = {"proj_dim": PROJ_DIM, "power": 0.5}
        return scores_spec(self.checkpoints, self.targets, model_output=OUTPUT, **sizes)

    def evaluate(self, path, retrained=None, stages=None, **changes):
        given = {
            "study_file": STUDY,
            "baselines": [],
            "sweep": None,
            "embeddings": [],
            "spec": self.spec,
            "retrained_spec": RETRAINED,
        }
        stages = stages or self.folder / "run"
        evaluate_scores(
            evaluation=path,
            scores=stages / "scores/mine.h5",
            checkpoint_scores=[stages / f"scores/mine/{c}.h5" for c in self.checkpoints],
            retrained=retrained or self.retrained,
            train_paths=self.features("train"),
            targets_paths=self.features("mine"),
            embeddings_spec=embeddings_spec(self),
            code="code",
            memory_mb=300,
            **{**given, **changes},
        )
        return path

    def trained_on(self, mask, seed):
        """Train on some samples by the study's function; return logits and labels of targets."""
        data = Subset(self.train.samples, np.flatnonzero(mask).tolist())
        model = self.study.function("train")(**ARGUMENTS, seed=seed, data=data).eval()
        images, labels = self.study.split("mine", self.targets).batch(0, N_TARGETS)
        with torch.no_grad():
            return model(images), labels

    def embeddings(self, folder, study=STUDY):
        """Compute embeddings under each checkpoint; return the files."""
        job = {"study_file": study, "code": "code", "device": "cpu", "batch_size": 7, "threads": 1}
        files = []
        for name, path in self.checkpoints.items():
            files.append(folder / f"embeddings-{name}.h5")
            spec = embeddings_spec(self).under(name)
            compute_embeddings(embeddings=files[-1], checkpoint=path, spec=spec, **job)
        return files

    def truth(self):
        """Return masks (S, n) and outputs (S, seeds, m) of models trained by a plain loop."""
        if not hasattr(self, "_truth"):
            n = len(self.train.ids)
            masks = np.stack([random_subset(n, n // 2, i, seed=4) for i in range(SUBSETS)])
            outputs = np.empty((SUBSETS, REPEATS, N_TARGETS))
            for i, mask in enumerate(masks):
                for repeat in range(REPEATS):
                    logits, labels = self.trained_on(mask, training_seed(4, i, repeat))
                    outputs[i, repeat] = margins(logits, labels)
            self._truth = masks.astype(float), outputs
        return self._truth

    def lds(self, scores):
        """Return the correlation of each target, by SciPy."""
        masks, outputs = self.truth()
        sums, mean = masks @ np.asarray(scores, dtype=float), outputs.mean(axis=1)
        return np.array([spearmanr(sums[:, j], mean[:, j]).statistic for j in range(N_TARGETS)])


def stored(run, key, split="train"):
    for path in run.features(split):
        yield pd.read_hdf(path, key).to_numpy()


def loss_weights(run):
    scores = [run.folder / f"run/scores/mine/{c}.h5" for c in run.checkpoints]
    return [h5py.File(path)["loss_weights"][:].astype(float) for path in scores]


def embeddings_spec(run):
    return replace(run.spec.features, projection={"kind": "embedding"}, split="all")
