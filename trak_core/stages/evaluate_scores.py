"""Measure how well scores and baselines predict the outputs of retrained models.

``docs/reference/files.md`` describes the tables in the resulting file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import (
    EVALUATION,
    FEATURES,
    RETRAINED,
    SCORES,
    Artifact,
    check_retrained,
    check_same,
    check_splits,
    create,
    open_artifact,
    read_frame,
    software,
)
from trak_core.attribution.fitted_checkpoint import normal_weights, read_rows, score_rows
from trak_core.config.memory_needs import evaluation_need
from trak_core.config.scoring_defaults import usual_combine, usual_power, usual_weighting
from trak_core.evaluation.baselines import gradient_dot_sums, label_sums, random_sums
from trak_core.evaluation.intervals import CONFIDENCE
from trak_core.evaluation.lds import (
    GroundTruth,
    curve_counts,
    lds_tables,
    order_models,
    sweep_tables,
)
from trak_core.evaluation.subset_sums import (
    CheckpointRows,
    FeaturePass,
    Key,
    average_weights,
    setting_sums,
    subset_sums,
)
from trak_core.model_outputs.about_outputs import about_output
from trak_core.settings import (
    TRAIN,
    Combine,
    FeaturesSpec,
    RetrainedSpec,
    ScoresSpec,
    Setting,
    Weighting,
    curvature_power,
    settings_of,
)
from trak_core.stages._shared import (
    bm25_of_targets,
    open_checkpoint_scores,
    open_made_for,
    read_directions,
)


def _passes(
    settings: Sequence[Setting], configured: Setting, spec: ScoresSpec
) -> list[FeaturePass]:
    """Return the passes over the stored features that are needed to compute scores.

    The passes compute the scores for all ``settings``. If training runs have several checkpoints,
    an additional first pass computes a baseline from only the last checkpoint of each run, with the
    default settings for runs that have one checkpoint.
    """
    unit_dim = configured.proj_dim if spec.normalize else None
    passes = []
    if len(spec.ends) < len(spec.checkpoints):
        output, combine = spec.features.model_output, usual_combine(several_times=False)
        ends = replace(configured, loss_weight_power=usual_power(combine, output), combine=combine)
        draws = spec.features.label_draws
        weighting = Weighting.PLAIN if draws else usual_weighting(combine, output)
        passes.append(FeaturePass([ends], spec.ends, weighting, unit_dim))
    # Features for a smaller proj_dim are the first dimensions of the stored features. They are
    # normalized after the dimensions are selected, so that each proj_dim needs its own pass.
    dims = sorted({setting.proj_dim for setting in settings}) if spec.normalize else [None]
    for dim in dims:
        same_dim = [setting for setting in settings if dim in (None, setting.proj_dim)]
        if same_dim:
            passes.append(FeaturePass(same_dim, spec.checkpoints, spec.weighting, dim))
    return passes


def _feature_sums(
    masks: np.ndarray,
    passes: Sequence[FeaturePass],
    files: Mapping[str, tuple[Path, Path, Artifact]],
    spec: ScoresSpec,
    block: int,
    *,
    gradient_dot: bool,
) -> tuple[list[dict[Setting, np.ndarray]], np.ndarray | None]:
    """Compute the sums of scores over each subset of training samples.

    ``files`` contains each checkpoint's training features, target features and scores.

    Returns:
        For each pass, the sums for each of its settings. Also the sums for the baseline
        ``gradient_dot``, or None without this baseline.
    """
    is_probability = about_output(spec.features.model_output).weight_is_probability
    totals: list[dict[Setting, np.ndarray]] = [{} for _ in passes]
    dots, averages = None, []
    for each in passes:
        loss_weights = [files[name][2].vector("loss_weights") for name in each.checkpoints]
        averages.append(average_weights(each.settings, loss_weights))
    for checkpoint, (train_path, targets_path, scored) in files.items():
        print(f"Checkpoint {checkpoint}", flush=True)
        with (
            open_artifact(train_path, FEATURES) as train,
            open_artifact(targets_path, FEATURES) as targets,
        ):
            check_splits(train, targets, spec.under(checkpoint))
            scored_hash = scored.spec["train_features"]
            check_same("training features", scored_hash, train.content_hash, train)
            check_same("targets", scored.ids("target_ids"), targets.ids("sample_ids"), targets)
            phi, loss_weights = train.matrix("features"), train.vector("loss_weights")
            target_phi = targets.matrix("features")[:].astype(np.float64)
            normal = train.matrix("sampled_normal")[:] if train.has("sampled_normal") else None
            for each, by_power, total in zip(passes, averages, totals, strict=True):
                if checkpoint not in each.checkpoints:
                    continue
                weights = {}
                for power in by_power:
                    weighting = each.weighting, power
                    curvature = curvature_power(*weighting, is_probability=is_probability)
                    weights[power] = normal_weights(train, curvature)
                dim = each.unit_dim
                read = read_rows(phi, normalize=dim is not None, first=dim)
                rows = CheckpointRows(loss_weights, weights, read, target_phi, block, normal)
                terms = setting_sums(masks, each.settings, by_power, rows)
                total.update({key: total.get(key, 0) + term for key, term in terms.items()})
            if gradient_dot:
                sums = gradient_dot_sums(masks, loss_weights, read_rows(phi), target_phi, block)
                dots = sums if dots is None else dots + sums
    return totals, dots


def evaluate_scores(
    *,
    evaluation: Path,
    study_file: Path,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    retrained: Sequence[Path],
    train_paths: Sequence[Path],
    targets_paths: Sequence[Path],
    embeddings: Sequence[Path],
    spec: ScoresSpec,
    embeddings_spec: FeaturesSpec,
    retrained_spec: RetrainedSpec | None,
    baselines: Sequence[str],
    sweep: dict[str, Any] | None,
    code: str,
    memory_mb: int,
) -> None:
    """Compare sums of scores over subsets with the outputs of models retrained on these subsets.

    Baselines are evaluated in the same way. ``baselines`` can contain random, same_class,
    gradient_dot, embedding_cosine and bm25.

    ``train_paths`` and ``targets_paths`` contain a file of features for each checkpoint, or are
    empty if no setting and no baseline needs features. ``embeddings`` contains the embeddings of
    each run's last checkpoint, which the baseline ``embedding_cosine`` needs. ``retrained_spec``
    contains the settings of the files ``retrained``, or is None if the user provides these files.
    ``sweep`` contains the values to try for the fields of ``Setting`` except ``combine``.
    """
    assert spec.loss_weight_power is not None
    projection = spec.features.projection
    proj_dim = projection.get("proj_dim", 0)
    configured = Setting(spec.damping, spec.loss_weight_power, Combine(spec.combine), proj_dim)
    settings = [] if sweep is None else settings_of(sweep, configured)
    with ExitStack() as stack:
        parts = open_checkpoint_scores(stack, checkpoint_scores, spec)
        final = stack.enter_context(open_made_for(scores, SCORES, spec))
        checkpoints = [part.spec["checkpoint"] for part in parts]
        check_same("checkpoints", checkpoints, final.spec["checkpoints"], final)
        train_ids, target_ids = parts[0].ids("train_ids"), parts[0].ids("target_ids")
        truth = read_ground_truth(retrained, train_ids, target_ids, retrained_spec)
        masks, n_train = truth.masks, len(train_ids)
        block = evaluation_need(
            proj_dim=proj_dim if train_paths else 0,
            n_train=n_train,
            n_targets=len(target_ids),
            n_subsets=len(masks),
            n_checkpoints=len(parts),
            settings=settings,
        ).rows(memory_mb)

        final_rows = read_rows(final.matrix("scores"))
        methods: dict[Key, np.ndarray] = {
            ("scores", "scores", proj_dim): subset_sums(masks, final_rows, block)
        }
        by_id = dict(zip(spec.checkpoints, parts, strict=True))
        by_count = {}
        for count in curve_counts(len(parts)):
            first = [by_id[checkpoint] for checkpoint in spec.along_runs[:count]]
            similarities = [read_rows(part.matrix("similarities")) for part in first]
            by_count[count] = subset_sums(masks, score_rows(first, similarities, spec), block)
        swept: dict[Setting, np.ndarray] = {}
        if train_paths:
            paths = zip(train_paths, targets_paths, parts, strict=True)
            files = dict(zip(spec.checkpoints, paths, strict=True))
            given = masks, _passes(settings, configured, spec), files, spec, block
            totals, dots = _feature_sums(*given, gradient_dot="gradient_dot" in baselines)
            if len(spec.ends) < len(parts):
                (methods["ends_of_runs", "baseline", proj_dim],) = totals.pop(0).values()
            if dots is not None:
                methods["gradient_dot", "baseline", proj_dim] = dots
            swept = {setting: total[setting] for total in totals for setting in total}
        if embeddings:
            given = embeddings, embeddings_spec, spec.ends, train_ids, target_ids
            cosines = [
                subset_sums(masks, read, block) @ directions.T
                for read, directions in read_directions(*given)
            ]
            methods["embedding_cosine", "baseline", 0] = np.mean(cosines, axis=0)
        for name in baselines:
            key = name, "baseline", 0
            if name == "random":
                methods[key] = random_sums(masks, len(target_ids), block)
            if name == "bm25":
                from trak_core.study.study import Study  # Other baselines do not need torch.

                study = Study.load(study_file)
                train = study.split(TRAIN, None)
                check_same("training samples", train_ids, train.ids, final)
                by_target = bm25_of_targets(study, train, target_ids)
                methods[key] = np.stack([masks @ own for own in by_target], axis=1)
            if name == "same_class":
                labels = parts[0].vector("train_labels"), parts[0].vector("target_labels")
                methods[key] = label_sums(masks, *labels, block)
        file_spec = spec.as_dict() | {
            "retrained": truth.source,
            "scores": final.content_hash,
            "projection": final.spec["projection"],
            "baselines": list(baselines),
            "sweep": sweep,
        }
    summary, targets, checkpoints = lds_tables(methods, by_count, truth, target_ids)
    about = {
        "experiment": spec.experiment,
        "n_subsets": len(masks),
        "part_kept": float(masks.mean()),
        "n_seeds": len(truth.outputs),
        "n_targets": len(target_ids),
        "confidence": CONFIDENCE,
    }
    made_by = software(code, "cpu", "numpy", "scipy", "pandas")
    with create(evaluation, EVALUATION, file_spec, made_by, **about) as writer:
        writer.table("summary", summary, ["method", "kind"])
        writer.table("targets", targets, ["method", "target_id"])
        writer.table("checkpoints", checkpoints, ["n_checkpoints"])
        if swept:
            sweep_table, best = sweep_tables(swept, configured, truth)
            writer.table("sweep", sweep_table, [])
            writer.table("best", best, [])
    print(summary.to_string(index=False))


def read_ground_truth(
    paths: Sequence[Path], train_ids: list[Any], target_ids: list[Any], spec: RetrainedSpec | None
) -> GroundTruth:
    """Read the subsets and the outputs of retrained models from all files in ``paths``.

    ``spec`` contains the settings of these files, or is None if the user provides the files.

    Returns:
        The joined data, with columns in the order of ``train_ids`` and ``target_ids``.
    """
    parts, source = [], []
    for path in paths:
        if spec is None:
            masks, outputs = (read_frame(path, key) for key in ("masks", "outputs"))
            digest = hashlib.blake2b(masks[0].tobytes() + outputs[0].tobytes(), digest_size=16)
            source.append(digest.hexdigest())
        else:
            with open_artifact(path, RETRAINED) as file:
                check_retrained(file, spec)
                masks, outputs = (
                    (file.matrix(key)[:], file.index(key), file.columns(key))
                    for key in ("masks", "outputs")
                )
                source.append(file.content_hash)
        parts.append(order_models(masks, outputs, train_ids, target_ids, path))
    masks, outputs = zip(*parts, strict=True)
    return GroundTruth(np.concatenate(masks), np.concatenate(outputs, axis=1), source)
