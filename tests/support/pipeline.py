"""Run the stages of a study in one process, as the workflow would, and return its scores file."""

from collections.abc import Callable
from contextlib import chdir
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pandas as pd
import yaml
from workspace import REPOSITORY

from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.config.read_config import read_config, record_config
from trak_core.config.specs_from_config import Specs
from trak_core.dependency_digests import content_digest
from trak_core.model_outputs.about_outputs import about_output
from trak_core.settings import EXACT, TRAIN, FeaturesSpec, ScoresSpec, curvature_power
from trak_core.stages.average_scores import average_scores
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_gramian import compute_gramian
from trak_core.stages.compute_scores import (
    compute_exact_scores,
    compute_normal_matrix,
    compute_scores,
)
from trak_core.stages.compute_token_scores import compute_token_scores
from trak_core.stages.join_shards import join_shards

# How a job runs that computes gradients.
ON_CPU = {"code": "code", "device": "cpu", "batch_size": 64, "memory_mb": 500, "threads": 1}

# Settings of scores without a projection.
EXACTLY = {"projection": {"kind": EXACT}, "dtype": "float64"}


def digest_of(targets):
    """The digest of target ids, or of all targets for None."""
    return content_digest(targets and [str(i) for i in targets])


def scores_spec(
    checkpoints,
    targets,
    *,
    model_output: str,
    kind: str = "rademacher",
    proj_dim: int | None = 8,
    seed: int = 0,
    projection: dict | None = None,
    damping: float = 2,
    weighting: str = "plain",
    combine: str = "product_of_averages",
    power: float = 1.0,
    normalize: bool = False,
    runs: dict[str, list[str]] | None = None,
    **features,
) -> ScoresSpec:
    """What decides the scores of experiment `mine`; each checkpoint is a run if none are given.

    Without a ``proj_dim`` the scores are exact.
    """
    is_probability = about_output(model_output).weight_is_probability
    if proj_dim is None:
        projection, features = {"kind": EXACT}, {"dtype": "float64", **features}
    everywhere = {
        "projection": projection or {"kind": kind, "proj_dim": proj_dim, "seed": seed},
        "checkpoint": None,
        "split": None,
    }
    return ScoresSpec(
        features=features_spec(model_output, **everywhere, **features),
        damping=damping,
        weighting=weighting,
        curvature_power=curvature_power(weighting, power, is_probability=is_probability),
        norm_power=power if combine == "unit_average" else None,
        normalize=normalize,
        experiment="mine",
        targets_digest=digest_of(targets),
        runs=runs or {checkpoint: [checkpoint] for checkpoint in sorted(checkpoints)},
        combine=combine,
        loss_weight_power=power,
    )


def features_spec(
    model_output: str,
    proj_dim: int | None = None,
    *,
    kind: str = "rademacher",
    targets: list | None = None,
    parameters: list[str] | None = None,
    **more,
) -> FeaturesSpec:
    """What decides the features of one split under one checkpoint."""
    return FeaturesSpec(**{
        "model_output": model_output,
        "parameter_patterns": parameters,
        "projection": {"kind": kind, "proj_dim": proj_dim, "seed": 0},
        "checkpoint": "c0",
        "split": "train",
        "dtype": "float32",
        "study_digest": "digest",
        "targets_digest": targets and digest_of(targets),
        **more,
    })


def run_stages(
    results: Path,
    study: Path,
    checkpoints: dict[str, Path],
    targets: list,
    *,
    keep: str = "full",
    shards: int = 1,
    batch_size: int = 64,
    memory_mb: int = 500,
    top: int = 5,
    made: Path | None = None,
    output_words: dict | None = None,
    **settings,
) -> Path:
    """Run the stages, and return the path of the scores file.

    If ``made`` is the folder of another run, its features are used instead of new ones.
    ``settings`` are the arguments of ``scores_spec``.
    """
    job = {"code": "code", "memory_mb": memory_mb}
    spec = scores_spec(checkpoints, targets, **settings)
    kind, stage = stage_of(spec)
    checkpoint_scores, train_features = [], []
    for checkpoint, path in sorted(checkpoints.items()):
        own, folder = spec.under(checkpoint), (made or results) / kind / checkpoint
        train, target = folder / "train.h5", folder / "mine.h5"
        numbers = range(1, shards + 1)
        parts = [train] if shards == 1 else [folder / f"train-{i}.h5" for i in numbers]
        files = [(part, own.of_train(), None, i) for i, part in enumerate(parts, start=1)]
        files.append((target, own.of_targets(), targets, 1))
        for file, of_file, ids, number in files if made is None else ():
            is_shard = shards > 1 and file != target
            stage(
                **{kind: file},
                checkpoint=path,
                study_file=study,
                spec=of_file,
                targets=ids,
                **({"shard": number, "n_shards": shards} if is_shard else {}),
                **ON_CPU | job | {"batch_size": batch_size},
            )
        if shards > 1:
            join_shards(features=train, shards=parts, spec=own.of_train(), code="code")
        checkpoint_scores.append(solved(results, checkpoint, folder, own, keep, **job))
        train_features.append(train)
    features = train_features if keep == "top_k" else []
    ways = {"top": top, "memory_mb": memory_mb, "output_words": output_words}
    return averaged(results / "scores/mine.h5", checkpoint_scores, spec, features, **ways)


run_exact_stages = partial(run_stages, proj_dim=None)


def stage_of(spec: ScoresSpec) -> tuple[str, Callable]:
    """Return the name of what is computed from gradients, and the stage that computes it."""
    if spec.features.projection.get("kind") == EXACT:  # absent where a config has the default
        return "gramian", compute_gramian
    return "features", compute_features


def solved(results: Path, checkpoint: str, folder: Path, spec: ScoresSpec, keep="full", **job):
    """Return the file of scores under one checkpoint, from the features or Gramians of a folder."""
    scores = results / f"scores/{spec.experiment}/{checkpoint}.h5"
    train, target = folder / "train.h5", folder / f"{spec.experiment}.h5"
    given = {"scores": scores, "train_path": train, "targets_path": target, "spec": spec}
    if stage_of(spec)[1] is compute_gramian:
        compute_exact_scores(**given, **job)
        return scores
    matrix = results / f"normal_matrix/{checkpoint}.h5"
    compute_normal_matrix(normal_matrix=matrix, features=train, spec=spec.of_normal_matrix(), **job)
    compute_scores(**given, normal_matrix=matrix, keep=keep, **job)
    return scores


def run_config(config_file: Path) -> Path:
    """Run all stages of a config in its folder and return its results folder.

    Its scores are the workflow's, of experiments with a file of their own too.
    """
    schema = REPOSITORY / "workflow/schemas/config.schema.yaml"
    with chdir(config_file.parent):
        with_ready_study(yaml.safe_load(config_file.read_text()))  # which writes its file
        config = read_config(config_file, schema)
        results = Path(config["results"])
        specs = Specs(config, results)
        record_config(specs.config, results)
        job = {"code": "code", "memory_mb": 500}
        for name, about in specs.checkpoints.items():
            kind = "features" if specs.is_projected else "gramian"
            stage = compute_features if specs.is_projected else compute_gramian
            for split in (TRAIN, *specs.experiments):
                question = specs.questions.get(split)
                stage(
                    **{kind: results / f"{kind}/{name}/{split}.h5"},
                    checkpoint=Path(about.path),
                    study_file=Path(config["study"]),
                    spec=specs.features(name, split),
                    targets=specs.experiments.get(split),
                    question=question and Path(question),
                    **ON_CPU,
                )
            for experiment in specs.experiments:
                spec = specs.scores(experiment).under(name)
                solved(results, name, results / kind / name, spec, **job)
        for experiment in specs.experiments:
            parts = [results / f"scores/{experiment}/{name}.h5" for name in specs.checkpoints]
            final = results / f"scores/{experiment}.h5"
            averaged(final, parts, specs.scores(experiment))
        return results.resolve()


def averaged(
    scores: Path,
    checkpoint_scores,
    spec,
    features=(),
    top=5,
    memory_mb=500,
    study_file=None,
    output_words=None,
) -> Path:
    """Return the scores file; ``features`` are needed where only solved targets were kept."""
    average_scores(
        scores=scores,
        checkpoint_scores=checkpoint_scores,
        features=features,
        spec=spec,
        defaults="",
        columns=about_output(output_words or spec.features.model_output).columns,
        top=top,
        output_words=output_words,
        study_file=study_file,
        code="code",
        memory_mb=memory_mb,
    )
    return scores


def token_scores(
    results: Path, study: Path, checkpoints: dict[str, Path], spec, experiment="mine", **more
) -> Path:
    """Return the file of the scores by token of a run with a projection."""
    path = results / f"token_scores/{experiment}.h5"
    compute_token_scores(
        token_scores=path,
        scores=results / f"scores/{experiment}.h5",
        checkpoints=list(checkpoints.values()),
        train_paths=[results / f"features/{c}/train.h5" for c in checkpoints],
        targets_paths=[results / f"features/{c}/{experiment}.h5" for c in checkpoints],
        normal_matrices=[results / f"normal_matrix/{c}.h5" for c in checkpoints],
        spec=spec,
        study_file=study,
        **ON_CPU | more,
    )
    return path


def changed(spec, **changes):
    """Return a spec with some fields replaced, those of its features too."""
    own = {k: v for k, v in changes.items() if k in {field.name for field in fields(spec)}}
    features = {k: v for k, v in changes.items() if k not in own}
    return replace(spec, features=replace(spec.features, **features), **own)


def read_scores(path: Path) -> pd.DataFrame:
    frame = pd.read_hdf(path, "scores")
    assert isinstance(frame, pd.DataFrame)
    return frame
