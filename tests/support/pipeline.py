"""Run the stages of a study in one process, as the workflow would, and return its scores file."""

from pathlib import Path

import pandas as pd

from trak_core.provenance import ids_digest
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_exact_scores import compute_exact_scores
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_gramian import compute_gramian
from trak_core.stages.compute_normal_matrix import compute_normal_matrix
from trak_core.stages.compute_scores import compute_scores
from trak_core.stages.join_shards import join_shards


def run_stages(
    results: Path,
    study: Path,
    checkpoints: dict[str, Path],
    targets: list,
    *,
    model_output: str,
    proj_dim: int,
    seed: int = 0,
    damping: float = 2,
    weighting: str = "plain",
    combine: str = "product_of_averages",
    power: float = 1.0,
    keep: str = "full",
    shards: int = 1,
    batch_size: int = 64,
    memory_mb: int = 500,
    parameters: list[str] | None = None,
    dtype: str = "float32",
    top: int = 5,
) -> Path:
    checkpoint_scores, train_features = [], []
    for checkpoint, path in sorted(checkpoints.items()):
        expected = {
            "checkpoint": checkpoint,
            "model_output": model_output,
            "projection": {"kind": "rademacher", "proj_dim": proj_dim, "seed": seed},
            "dtype": dtype,
            "study": "digest",
            "parameter_patterns": parameters,
        }
        to_train = {**expected, "split": "train", "targets_digest": None}
        to_targets = {**expected, "split": "mine", "targets_digest": ids_digest(targets)}

        def features(split, ids, number=1, of=1, *, expected=expected, path=path):
            name = f"{split}.h5" if of == 1 else f"{split}-{number}.h5"
            file = results / "features" / expected["checkpoint"] / name
            compute_features(
                features=file,
                checkpoint=path,
                study=study,
                split=split,
                shard=number,
                n_shards=of,
                spec={**expected, "targets": ids},
                code="code",
                device="cpu",
                batch_size=batch_size,
                memory_mb=memory_mb,
                threads=1,
            )
            return file

        if shards == 1:
            train = features("train", None)
        else:
            train = results / "features" / checkpoint / "train.h5"
            parts = [features("train", None, i, shards) for i in range(1, shards + 1)]
            join_shards(features=train, shards=parts, code="code")
        target = features("mine", targets)
        matrix = results / "normal_matrix" / f"{checkpoint}.h5"
        compute_normal_matrix(
            normal_matrix_file=matrix,
            features=train,
            expected=to_train,
            weighting=weighting,
            code="code",
            memory_mb=memory_mb,
        )
        scores = results / "scores/mine" / f"{checkpoint}.h5"
        compute_scores(
            scores=scores,
            train=train,
            targets=target,
            normal_matrix=matrix,
            expected=to_targets,
            damping=damping,
            weighting=weighting,
            keep=keep,
            code="code",
            memory_mb=memory_mb,
        )
        checkpoint_scores.append(scores)
        train_features.append(train)
    final = results / "scores/mine.h5"
    average_scores(
        scores=final,
        checkpoint_scores=checkpoint_scores,
        features=train_features if keep == "top_k" else [],
        expected={
            "projection": {"kind": "rademacher", "proj_dim": proj_dim, "seed": seed},
            "model_output": model_output,
            "dtype": dtype,
            "study": "digest",
            "parameter_patterns": parameters,
            "targets_digest": ids_digest(targets),
            "experiment": "mine",
            "weighting": weighting,
            "damping": damping,
            "checkpoints": sorted(checkpoints),
        },
        combine=combine,
        loss_weight_power=power,
        top=top,
        code="code",
        memory_mb=memory_mb,
    )
    return final


def run_exact_stages(
    results: Path,
    study: Path,
    checkpoints: dict[str, Path],
    targets: list,
    *,
    model_output: str,
    damping: float = 2,
    weighting: str = "plain",
    combine: str = "product_of_averages",
    power: float = 1.0,
    batch_size: int = 64,
    memory_mb: int = 500,
    parameters: list[str] | None = None,
) -> Path:
    """The same without a projection."""
    settings = {
        "model_output": model_output,
        "projection": {"kind": "exact"},
        "dtype": "float64",
        "study": "digest",
        "parameter_patterns": parameters,
    }
    to_targets = {**settings, "targets_digest": ids_digest(targets)}
    checkpoint_scores = []
    for checkpoint, path in sorted(checkpoints.items()):
        gramians = {s: results / "gramian" / checkpoint / f"{s}.h5" for s in ("train", "mine")}
        for split, file in gramians.items():
            compute_gramian(
                gramian=file,
                checkpoint=path,
                study=study,
                split=split,
                spec={
                    **settings,
                    "checkpoint": checkpoint,
                    "targets": targets if split == "mine" else None,
                },
                code="code",
                device="cpu",
                batch_size=batch_size,
                memory_mb=memory_mb,
                threads=1,
            )
        scores = results / "scores/mine" / f"{checkpoint}.h5"
        compute_exact_scores(
            scores=scores,
            train=gramians["train"],
            targets=gramians["mine"],
            expected={**to_targets, "checkpoint": checkpoint, "split": "mine"},
            damping=damping,
            weighting=weighting,
            code="code",
            memory_mb=memory_mb,
        )
        checkpoint_scores.append(scores)
    final = results / "scores/mine.h5"
    average_scores(
        scores=final,
        checkpoint_scores=checkpoint_scores,
        features=[],
        expected={
            **to_targets,
            "experiment": "mine",
            "weighting": weighting,
            "damping": damping,
            "checkpoints": sorted(checkpoints),
        },
        combine=combine,
        loss_weight_power=power,
        top=5,
        code="code",
        memory_mb=memory_mb,
    )
    return final


def read_scores(path: Path) -> pd.DataFrame:
    frame = pd.read_hdf(path, "scores")
    assert isinstance(frame, pd.DataFrame)
    return frame
