"""Measure an experiment's scores against retrained models: LDS, its ceiling, and what is beside it.

``docs/evaluation.md`` describes the tables of the file that is written.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from trak_core.artifacts import (
    CHECKPOINT_SCORES,
    EVALUATION,
    EXACT_SCORES,
    SCORES,
    Artifact,
    check_same,
    check_together,
    create,
    open_artifact,
)
from trak_core.config.budget import evaluation_need
from trak_core.scoring.scores import combined, powered
from trak_core.spec import EXACT, Combine
from trak_core.stages._truth import read_ground_truth
from trak_core.system.progress import blocks_with_progress
from trak_core.system.software import software
from trak_core.trust.lds import CONFIDENCE, lds_tables, sweep_tables
from trak_core.trust.rivals import Key, Setting, cosine_sums, feature_sums, simple_sums


def _counts(n_checkpoints: int) -> list[int]:
    """Return 1, 2, 3, 5, 10, 20, 30, 50, 100, ... below a number of checkpoints, and it."""
    steps = [digit * 10**power for power in range(4) for digit in (1, 2, 3, 5)]
    return [count for count in steps if count < n_checkpoints] + [n_checkpoints]


def _sums_by_count(
    parts: Sequence[Artifact], masks: np.ndarray, power: float, combine: Combine, block: int
) -> dict[int, np.ndarray]:
    """Return subset sums of the scores with the first checkpoints, for every count."""
    n_train = masks.shape[1]
    sums = {count: np.zeros(()) for count in _counts(len(parts))}

    def checkpoints(count: int, start: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in parts[:count]:
            weights = part.vector("loss_weights", start, stop)
            yield part.matrix("similarities")[start:stop], powered(weights, power)

    for start, stop in blocks_with_progress(n_train, block, "training samples"):
        for count in sums:
            rows = combined(checkpoints(count, start, stop), combine)
            sums[count] = sums[count] + masks[:, start:stop] @ rows
    return sums


def _check_scores(scores: Artifact, expected: dict[str, Any], parts: Sequence[Artifact]) -> None:
    """Refuse scores of another config than today's, or of other checkpoints' files."""
    wanted = {k: v for k, v in expected.items() if k not in ("projection", "checkpoints")}
    found = {key: scores.spec.get(key) for key in wanted}
    wanted["projection"] = expected["projection"]
    found["projection"] = {k: scores.spec["projection"].get(k) for k in expected["projection"]}
    wanted["checkpoints"] = [part.spec["checkpoint"] for part in parts]
    found["checkpoints"] = scores.spec["checkpoints"]
    check_same("settings of today's config", wanted, found, scores.path, SCORES.rule)


def evaluate_scores(
    *,
    evaluation: Path,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    retrained: Sequence[Path],
    features: Sequence[tuple[Path, Path, Path]],
    embeddings: Sequence[Path],
    expected: dict[str, Any],
    expected_embeddings: dict[str, Any],
    expected_retrained: dict[str, Any] | None,
    baselines: Sequence[str],
    trak: Sequence[int],
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
        features: Training features, target features and normal matrix of each checkpoint; empty
            where nothing needs them.
        embeddings: Of each checkpoint; empty without ``embedding_cosine``.
        expected: See ``check_together``; and combine and loss_weight_power.
        expected_embeddings: See ``cosine_sums``.
        expected_retrained: What retrained models must say of themselves; None for a user's.
        baselines: Any of random, same_class, gradient_dot and embedding_cosine.
        trak: Dimensions to measure TRAK 0.3.2's formula at, with lambda 0.
        sweep: Values of each field of ``Setting``; None for none.
        code: The stage's code digest.
        memory_mb: Budget for arrays.

    Raises:
        InputError: If files don't belong together, or exceed the budget.
    """
    power, combine = expected["loss_weight_power"], Combine(expected["combine"])
    is_exact = expected["projection"]["kind"] == EXACT
    of_each = {k: v for k, v in expected.items() if k not in ("combine", "loss_weight_power")}
    with ExitStack() as stack:
        kind = EXACT_SCORES if is_exact else CHECKPOINT_SCORES
        parts = [stack.enter_context(open_artifact(path, kind)) for path in checkpoint_scores]
        final = stack.enter_context(open_artifact(scores, SCORES))
        check_together(parts, of_each, kind.rule)
        _check_scores(final, expected, parts)
        train_ids, target_ids = parts[0].ids("train_ids"), parts[0].ids("target_ids")
        truth = read_ground_truth(retrained, train_ids, target_ids, expected_retrained)
        masks, mean = truth.masks, truth.outputs.mean(axis=0)
        own = Setting(
            expected["damping"], power, str(combine), expected["projection"].get("proj_dim", 0)
        )
        block = evaluation_need(
            proj_dim=own.proj_dim if features else 0,
            n_train=len(train_ids),
            n_targets=len(target_ids),
            n_subsets=len(masks),
            n_checkpoints=len(parts),
            sweep=sweep,
        ).rows(memory_mb)

        values = final.matrix("scores")
        total = np.zeros(mean.shape)
        for start in range(0, len(train_ids), block):
            total += masks[:, start : start + block] @ values[start : start + block]
        methods: dict[Key, np.ndarray] = {("scores", "scores", own.proj_dim): total}
        by_count = _sums_by_count(parts, masks, power, combine, block)
        swept: dict[Setting, np.ndarray] = {}
        if features:
            of_features = {"damping", "weighting", "experiment"}
            beside = feature_sums(
                features,
                parts,
                masks,
                expected={
                    **{k: v for k, v in of_each.items() if k not in of_features},
                    "split": expected["experiment"],
                },
                weighting=expected["weighting"],
                own=own,
                sweep=sweep,
                trak=trak,
                gradient_dot="gradient_dot" in baselines,
                block=block,
            )
            methods |= beside.methods
            swept = beside.swept
        if embeddings:
            key = ("embedding_cosine", "baseline", 0)
            methods[key] = cosine_sums(
                embeddings, masks, train_ids, target_ids, expected_embeddings, block
            )
        methods |= simple_sums(baselines, masks, parts[0], block)

        summary, targets, curve = lds_tables(methods, by_count, truth, target_ids)
        spec = {
            **expected,
            "retrained": truth.source,
            "scores": final.content_hash,
            "baselines": list(baselines),
            "trak": list(trak),
            "sweep": sweep,
        }
        with create(
            evaluation,
            EVALUATION,
            spec,
            software(code, "cpu", "numpy", "scipy", "pandas"),
            experiment=expected["experiment"],
            n_subsets=len(masks),
            n_seeds=len(truth.outputs),
            n_targets=len(target_ids),
            confidence=CONFIDENCE,
        ) as writer:
            writer.table("summary", summary, ["method", "kind"])
            writer.table("targets", targets, ["method", "target_id"])
            writer.table("checkpoints", curve, ["n_checkpoints"])
            if swept:
                for key, table in zip(
                    ("sweep", "best"), sweep_tables(swept, own, truth), strict=True
                ):
                    writer.table(key, table, [])
        print(summary.to_string(index=False))
