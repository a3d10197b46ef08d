"""Measure an experiment's scores against retrained models: LDS, its ceiling, and what is beside it.

``docs/evaluation.md`` describes the tables of the file that is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EMBEDDINGS,
    EVALUATION,
    EXACT_SCORES,
    FEATURES,
    SCORES,
    Artifact,
    check_made_for,
    check_same,
    check_splits,
    check_together,
    create,
    open_artifact,
)
from trak_core.config.memory import evaluation_need
from trak_core.config.rules import usual_combine, usual_power, usual_weighting
from trak_core.config.sweep import Setting, settings_of
from trak_core.model_outputs.table import TABLE
from trak_core.scoring.scores import combined
from trak_core.scoring.weights import powered
from trak_core.spec import EXACT, Combine, FeaturesSpec, RetrainedSpec, ScoresSpec, curvature_power
from trak_core.stages._splits import ReadRows, norm_of, normal_weights, rows_of
from trak_core.stages._truth import read_ground_truth
from trak_core.system.progress import blocks_with_progress, software
from trak_core.trust.lds import CONFIDENCE, lds_tables, sweep_tables
from trak_core.trust.rivals import (
    FeatureRivals,
    Key,
    average_weights,
    cosine_sums,
    label_sums,
    random_sums,
)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores that belong together, and the subsets they are summed over.

    Attributes:
        spec: Of all checkpoints.
        parts: Each checkpoint's scores.
        masks: Shape (S, n), float64.
        own: The study's own setting.
        block: Training samples at once.
    """

    spec: ScoresSpec
    parts: Sequence[Artifact]
    masks: np.ndarray
    own: Setting
    block: int

    @property
    def by_id(self) -> dict[str, Artifact]:
        """Each checkpoint's scores by its id."""
        return dict(zip(self.spec.checkpoints, self.parts, strict=True))

    def sums(self, final: Artifact) -> np.ndarray:
        """Return the sums of the final scores, shape (S, m)."""
        values = final.matrix("scores")
        total = np.zeros((len(self.masks), values.shape[1]))
        for start in range(0, self.masks.shape[1], self.block):
            rows = slice(start, start + self.block)
            total += self.masks[:, rows] @ values[rows]
        return total

    def sums_of(self, selections: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Return the sums of scores with some of the checkpoints, for each selection of them."""
        sums = [np.zeros(()) for _ in selections]
        power, combine = self.own.weighting

        def chosen(
            ids: Sequence[str], start: int, stop: int
        ) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
            for part in map(self.by_id.__getitem__, ids):
                weights = part.vector("loss_weights", start, stop)
                rows = part.matrix("similarities")[start:stop]
                yield rows, powered(weights, power), norm_of(part, self.spec)

        n_train = self.masks.shape[1]
        for start, stop in blocks_with_progress(n_train, self.block, "training samples"):
            for i, ids in enumerate(selections):
                rows = combined(chosen(ids, start, stop), combine)
                sums[i] = sums[i] + self.masks[:, start:stop] @ rows
        return sums

    def baseline_sums(self, names: Sequence[str]) -> dict[Key, np.ndarray]:
        """Return the sums of the baselines that need no gradients; other names are passed over."""
        labels, own = (self.parts[0].vector(f"{side}_labels") for side in ("train", "target"))
        sums = {
            "random": lambda: random_sums(self.masks, len(own), self.block),
            "same_class": lambda: label_sums(self.masks, labels, own, self.block),
        }
        return {(name, "baseline", 0): sums[name]() for name in names if name in sums}

    def embedding_sums(self, paths: Sequence[Path], spec: FeaturesSpec) -> np.ndarray:
        """Return the sums of cosines between embeddings, averaged over ends of runs."""
        train_ids, target_ids = (self.parts[0].ids(f"{side}_ids") for side in ("train", "target"))
        total = np.zeros(())
        for path, checkpoint in zip(paths, self.spec.ends, strict=True):
            with open_artifact(path, EMBEDDINGS) as file:
                check_made_for(file, spec.under(checkpoint), EMBEDDINGS.rule)
                same = train_ids, file.index("train")
                check_same("training samples", *same, path, EMBEDDINGS.rule)
                row = {target: i for i, target in enumerate(file.index("targets"))}
                there = [target for target in target_ids if target in row]
                check_same("targets", target_ids, there, path, EMBEDDINGS.rule)
                # HDF5 reads rows in their own order.
                rows, place = np.unique([row[i] for i in target_ids], return_inverse=True)
                targets = file.matrix("targets")[rows][place]
                blocks = _blocks(rows_of(file.matrix("train")), len(train_ids), self.block)
                total = total + cosine_sums(self.masks, blocks, targets)
        return total / len(paths)

    def feature_sums(
        self,
        rivals: FeatureRivals,
        files: Mapping[str, tuple[Path, Path]],
        weighting: str,
        *,
        unit: int | None,
    ) -> dict[Key | Setting, np.ndarray]:
        """Return the sums of everything that comes straight from features.

        Args:
            rivals: What to sum.
            files: Training features and target features of some checkpoints.
            weighting: ``plain`` or ``curvature``.
            unit: Take so many numbers of training features and divide them by their length; None
                for all of them as they are.
        """
        found: dict[Key | Setting, np.ndarray] = {}
        for checkpoint, (train, targets) in files.items():
            scored = self.by_id[checkpoint]
            print(f"Checkpoint {checkpoint}", flush=True)
            with (
                open_artifact(train, FEATURES) as train_file,
                open_artifact(targets, FEATURES) as target_file,
            ):
                _check_files(train_file, target_file, scored, self.spec.under(checkpoint))
                values = train_file.matrix("features")
                rows = rows_of(values, normalize=unit is not None, first=unit)
                shares = rivals.sums(
                    self.masks,
                    scored.vector("loss_weights"),
                    self._normal_weights(rivals.powers, train_file, weighting),
                    _blocks(rows, len(values), self.block),
                    target_file.matrix("features")[:].astype(np.float64),
                )
            for key, share in shares.items():
                found[key] = found[key] + share if key in found else share
        return found

    def ends_sums(self, files: Mapping[str, tuple[Path, Path]]) -> np.ndarray:
        """Return the sums of scores from the last checkpoint of every run, by their defaults."""
        model_output, combine = self.spec.features.model_output, usual_combine(along=False)
        power = usual_power(combine, model_output)
        setting = replace(self.own, loss_weight_power=power, combine=combine)
        weights = [self.by_id[one].vector("loss_weights") for one in self.spec.ends]
        rivals = FeatureRivals([setting], None, average_weights([setting], weights))
        of_ends = {one: files[one] for one in self.spec.ends}
        weighting = usual_weighting(combine, model_output)
        unit = self.own.proj_dim if self.spec.normalize else None
        return self.feature_sums(rivals, of_ends, weighting, unit=unit)[setting]

    def _normal_weights(
        self, powers: Sequence[float], train: Artifact, weighting: str
    ) -> dict[float, np.ndarray]:
        """Return the diagonal of W for every power of loss weights."""
        is_probability = TABLE[self.spec.features.model_output].weight_is_probability

        def diagonal(power: float) -> np.ndarray:
            own = curvature_power(weighting, power, is_probability=is_probability)
            return normal_weights(train, own)

        return {power: diagonal(power) for power in powers}


def _counts(n_checkpoints: int) -> list[int]:
    """Return 1, 2, 3, 5, 10, 20, 30, 50, 100, ... below a number of checkpoints, and it."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def _blocks(rows: ReadRows, n_rows: int, block: int) -> Iterator[tuple[int, int, np.ndarray]]:
    for start in range(0, n_rows, block):
        stop = min(start + block, n_rows)
        yield start, stop, rows(start, stop)


def _check_files(train: Artifact, targets: Artifact, scored: Artifact, spec: ScoresSpec) -> None:
    """Refuse features that a checkpoint's scores were not made of."""
    check_splits(train, targets, spec, FEATURES)
    made_of = scored.spec["train_features"]
    check_same("training features", made_of, train.content_hash, train.path, FEATURES.rule)
    ids = scored.ids("target_ids"), targets.ids("sample_ids")
    check_same("targets", *ids, targets.path, FEATURES.rule)


def _check_final(final: Artifact, spec: ScoresSpec, parts: Sequence[Artifact]) -> None:
    """Refuse scores of another config than today's, or of other checkpoints' files."""
    check_made_for(final, spec, SCORES.rule)
    made_of = [part.spec["checkpoint"] for part in parts]
    check_same("checkpoints", made_of, final.spec["checkpoints"], final.path, SCORES.rule)


def evaluate_scores(
    *,
    evaluation: Path,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    retrained: Sequence[Path],
    train: Sequence[Path],
    targets: Sequence[Path],
    embeddings: Sequence[Path],
    spec: ScoresSpec,
    embeddings_spec: FeaturesSpec,
    retrained_spec: RetrainedSpec | None,
    baselines: Sequence[str],
    sweep: dict[str, Any] | None,
    code: str,
    memory_mb: int,
) -> None:
    """Compare subset sums of scores, and of what stands beside them, with retrained models.

    Args:
        evaluation: The file to write.
        scores: The experiment's scores.
        checkpoint_scores: Those of each checkpoint.
        retrained: The pipeline's retrained models, or a file of a user's.
        train: Training features of each checkpoint; empty where nothing needs features.
        targets: Likewise the targets' features.
        embeddings: Of the last checkpoint of each run; empty without ``embedding_cosine``.
        spec: What the scores must be: of all checkpoints.
        embeddings_spec: What the embeddings must be.
        retrained_spec: What retrained models must be; None for a user's.
        baselines: Any of random, same_class, gradient_dot and embedding_cosine.
        sweep: Values of each field of ``Setting`` but ``combine``; None for none.
        code: The stage's code digest.
        memory_mb: Budget for arrays.

    Raises:
        InputError: If files don't belong together, or exceed the budget.
    """
    assert spec.loss_weight_power is not None
    projection = spec.features.projection
    proj_dim = projection.get("proj_dim", 0)
    own = Setting(spec.damping, spec.loss_weight_power, Combine(spec.combine), proj_dim)
    settings = settings_of(sweep, own)
    with ExitStack() as stack:
        kind = EXACT_SCORES if projection.get("kind") == EXACT else CHECKPOINT_SCORES
        parts = [stack.enter_context(open_artifact(path, kind)) for path in checkpoint_scores]
        final = stack.enter_context(open_artifact(scores, SCORES))
        check_together(parts, spec, kind)
        _check_final(final, spec, parts)
        train_ids, target_ids = parts[0].ids("train_ids"), parts[0].ids("target_ids")
        truth = read_ground_truth(retrained, train_ids, target_ids, retrained_spec)
        block = evaluation_need(
            proj_dim=proj_dim if train else 0,
            n_train=len(train_ids),
            n_targets=len(target_ids),
            n_subsets=len(truth.masks),
            n_checkpoints=len(parts),
            n_settings=len(settings),
            n_weightings=len({setting.weighting for setting in settings}),
            n_powers=len({setting.loss_weight_power for setting in settings}) or bool(train),
        ).rows(memory_mb)
        scored = _Scored(spec, parts, truth.masks, own, block)

        methods: dict[Key, np.ndarray] = {("scores", "scores", proj_dim): scored.sums(final)}
        counts = _counts(len(parts))
        selections = [spec.along_runs[:count] for count in counts]
        by_count = scored.sums_of(selections)
        swept: dict[Setting, np.ndarray] = {}
        if train:
            averages = average_weights(settings, [part.vector("loss_weights") for part in parts])
            dot = proj_dim if "gradient_dot" in baselines else None
            passes = [(FeatureRivals(settings, dot, averages), None)]
            if spec.normalize:
                # Fewer numbers have another length; the baseline's gradients stay as they are.
                dim_of = attrgetter("proj_dim")
                by_dim = groupby(sorted(settings, key=dim_of), dim_of)
                passes = [(FeatureRivals([*of], None, averages), dim) for dim, of in by_dim]
                passes += [(FeatureRivals([], dot, {}), None)]
            pairs = zip(train, targets, strict=True)
            files = dict(zip(spec.checkpoints, pairs, strict=True))
            if len(spec.ends) < len(parts):
                methods["ends_of_runs", "baseline", proj_dim] = scored.ends_sums(files)
            for rivals, unit in passes:
                if not rivals.settings and rivals.gradient_dot is None:
                    continue
                summed = scored.feature_sums(rivals, files, spec.weighting, unit=unit)
                for key, sums in summed.items():
                    if isinstance(key, Setting):
                        swept[key] = sums
                    else:
                        methods[key] = sums
        if embeddings:
            key = ("embedding_cosine", "baseline", 0)
            methods[key] = scored.embedding_sums(embeddings, embeddings_spec)
        methods |= scored.baseline_sums(baselines)
        source = {
            "retrained": truth.source,
            "scores": final.content_hash,
            "projection": final.spec["projection"],
            "baselines": list(baselines),
            "sweep": sweep,
        }
    counted = dict(zip(counts, by_count, strict=True))
    summary, of_targets, curve = lds_tables(methods, counted, truth, target_ids)
    with create(
        evaluation,
        EVALUATION,
        spec.as_dict() | source,
        software(code, "cpu", "numpy", "scipy", "pandas"),
        experiment=spec.experiment,
        n_subsets=len(truth.masks),
        n_seeds=len(truth.outputs),
        n_targets=len(target_ids),
        confidence=CONFIDENCE,
    ) as writer:
        writer.table("summary", summary, ["method", "kind"])
        writer.table("targets", of_targets, ["method", "target_id"])
        writer.table("checkpoints", curve, ["n_checkpoints"])
        if swept:
            for key, table in zip(("sweep", "best"), sweep_tables(swept, own, truth), strict=True):
                writer.table(key, table, [])
    print(summary.to_string(index=False))
