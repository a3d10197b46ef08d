"""One study, by TRAK's interface and by the pipeline's stages."""

import numpy as np
import pandas as pd
import torch
from pipeline import read_scores, scores_spec

import trak_core.compat as trak
from trak_core.config.digests import study_digests
from trak_core.spec import stream_of
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_normal_matrix import compute_normal_matrix
from trak_core.stages.compute_scores import compute_scores

N, K, DAMPING = 60, 16, 0.3
TARGETS = [3, 0, 8]
STUDY = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

generator = torch.Generator().manual_seed(5)
x, y = torch.randn(70, 6, generator=generator), torch.randint(3, (70,), generator=generator)


def make_model():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train_data():
    return TensorDataset(x[:60], y[:60])


def target_data():
    return TensorDataset(x[60:], y[60:])
"""


def make_study(tmp_path):
    path = tmp_path / "study.py"
    path.write_text(STUDY)
    names: dict = {}
    exec(STUDY, names)
    names["path"], names["checkpoints"] = path, {}
    for seed, name in enumerate(("run1", "run2")):
        torch.manual_seed(seed)
        names["checkpoints"][name] = tmp_path / f"{name}.pt"
        torch.save(names["make_model"]().state_dict(), tmp_path / f"{name}.pt")
    return names


def tracer(study, folder, lambda_reg=0.0):
    return trak.TRAKer(
        model=study["make_model"](),
        task="image_classification",
        train_set_size=N,
        save_dir=folder,
        device="cpu",
        proj_dim=K,
        use_half_precision=False,
        lambda_reg=lambda_reg,
        logging_level=100,
    )


def featurized(study, folder, **arguments):
    """As a notebook would: the model id of a checkpoint is the stream of its projection."""
    made = tracer(study, folder, **arguments)
    for name, path in study["checkpoints"].items():
        made.load_checkpoint(torch.load(path), model_id=stream_of(name))
        made.featurize((study["x"][:N], study["y"][:N]), num_samples=N)
    made.finalize_features()
    rows = torch.tensor(TARGETS) + N
    for name, path in study["checkpoints"].items():
        state = torch.load(path)
        made.start_scoring_checkpoint("mine", state, stream_of(name), len(TARGETS))
        made.score((study["x"][rows], study["y"][rows]), num_samples=len(TARGETS))
    return made


def mean_inverse(tracer, model_id):
    """mean |K|, by which 0.3.2 divides: the pipeline keeps the absolute scale."""
    tracer.saver.load_current_store(model_id)
    g = np.array(tracer.saver.current_store["grads"], dtype=np.float64)
    # The pipeline's damping is relative: the same on its scale and on TRAK's.
    shift = DAMPING * (g**2).sum(1).mean()
    return np.abs(np.linalg.inv(g.T @ g + shift * np.eye(K))).mean(), shift


def expected_spec(study):
    return scores_spec(
        study["checkpoints"],
        TARGETS,
        model_output="image_classification",
        projection={"kind": "rademacher", "proj_dim": K, "seed": 0},
        damping=DAMPING,
        study_digest=study_digests(study["path"])["features"],
        targets_code=study_digests(study["path"])["targets"],
    )


def pipeline_scores(study, folder, features) -> pd.DataFrame:
    """Normal matrix, scores and their average, by the pipeline's stages from features alone."""
    parts = []
    for name in study["checkpoints"]:
        train, targets = (features / name / f"{split}.h5" for split in ("train", "mine"))
        spec = expected_spec(study).under(name)
        compute_normal_matrix(
            normal_matrix=folder / f"{name}-matrix.h5",
            features=train,
            spec=spec.of_normal_matrix(),
            code="code",
            memory_mb=100,
        )
        parts.append(folder / f"{name}-scores.h5")
        compute_scores(
            scores=parts[-1],
            train_path=train,
            targets_path=targets,
            normal_matrix=folder / f"{name}-matrix.h5",
            spec=spec,
            keep="full",
            code="code",
            memory_mb=100,
        )
    average_scores(
        columns="",
        scores=folder / "mine.h5",
        checkpoint_scores=parts,
        features=[],
        spec=expected_spec(study),
        defaults="",
        top=3,
        code="code",
        memory_mb=100,
    )
    return read_scores(folder / "mine.h5")


def featurized_by_the_pipeline(study, file, name, split, targets=None):
    own = expected_spec(study).under(name)
    compute_features(
        features=file,
        checkpoint=study["checkpoints"][name],
        study_file=study["path"],
        spec=own.of_train() if split == "train" else own.of_targets(),
        targets=targets,
        code="code",
        device="cpu",
        batch_size=16,
        memory_mb=100,
        threads=1,
    )


def compat_scores(study, folder) -> np.ndarray:
    """What the pipeline computes, by TRAK's interface: its lambda, its 1 / mean |K| taken off."""
    similarities, weights = [], []
    for name in study["checkpoints"]:
        model_id = stream_of(name)
        made = tracer(study, folder)
        factor, shift = mean_inverse(made, model_id)
        made = tracer(study, folder, lambda_reg=shift)
        made.finalize_features(model_ids=[model_id])
        scores = np.array(made.finalize_scores("mine", model_ids=[model_id]))
        made.saver.load_current_store(model_id)
        weights.append(np.array(made.saver.current_store["out_to_loss"]))
        similarities.append(scores / weights[-1] * factor)
    return np.mean(similarities, 0) * np.mean(weights, 0)
