"""Sum an experiment's scores over groups of training samples, with confidence intervals."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    FEATURES,
    GROUPS,
    SCORES,
    Artifact,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.attribution.fitted_checkpoint import ReadRows
from trak_core.attribution.score_formulas import powered
from trak_core.config.memory_needs import GroupsNeed
from trak_core.evaluation.intervals import CONFIDENCE
from trak_core.lists.groups import (
    N_DRAWS,
    Grouping,
    GroupSums,
    chance_of_samples,
    group_interval,
    group_tables,
    run_weights,
)
from trak_core.runtime.progress import blocks_with_progress
from trak_core.settings import Combine, ScoresSpec
from trak_core.stages._shared import open_checkpoint_scores, open_made_for, stored_similarities


def sum_groups(
    *,
    groups: Path,
    scores: Path,
    checkpoint_scores: Sequence[Path],
    features: Sequence[Path],
    spec: ScoresSpec,
    group_by: Sequence[str],
    code: str,
    memory_mb: int,
) -> None:
    """Write sums and means of scores for the groups in each column, and differences of means.

    Groups are defined by the columns ``group_by`` of the table ``train`` in the file ``scores``. If
    the table ``targets`` has a column ``improves``, the sign of scores that improve a target,
    scores are multiplied by that sign. Sums are computed from ``checkpoint_scores``, and with
    ``keep: top_k`` also from ``features``.
    """
    with open_made_for(scores, SCORES, spec) as file:
        train, scores_hash = file.table("train"), file.content_hash
        targets = file.table("targets")
    groupings = [Grouping.of(name, train[name]) for name in group_by]
    with ExitStack() as stack:
        parts = open_checkpoint_scores(stack, checkpoint_scores, spec)
        phis = [stack.enter_context(open_artifact(path, FEATURES)) for path in features]
        check_same("training samples", train["id"].tolist(), parts[0].ids("train_ids"), file)
        rows = stored_similarities(parts, phis, normalize=spec.normalize)
        target_ids = parts[0].ids("target_ids")
        improves = targets["improves"] if "improves" in targets else np.ones(len(target_ids))
        assert spec.runs is not None
        plain, drawn, ends = _sums(parts, rows, spec, groupings, np.asarray(improves), memory_mb)
        table, targets, differences = group_tables(
            groupings, plain, drawn, ends, target_ids, len(spec.runs)
        )
        file_spec = spec.as_dict() | {"scores": scores_hash, "groups": list(group_by)}
        made_by = software(code, "cpu", "numpy", "scipy", "pandas")
        counts = {"n_draws": N_DRAWS, "n_runs": len(spec.runs), "n_targets": len(target_ids)}
        with create(groups, GROUPS, file_spec, made_by, confidence=CONFIDENCE, **counts) as writer:
            writer.table("groups", table, ["column", "group"])
            writer.table("targets", targets, ["column", "group", "target_id"])
            if len(differences):
                writer.table("differences", differences, ["column", "group", "other"])
    print(table.to_string(index=False))


def _sums(
    parts: Sequence[Artifact],
    rows: Sequence[ReadRows],
    spec: ScoresSpec,
    groupings: Sequence[Grouping],
    improves: np.ndarray,
    memory_mb: int,
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return sums of scores, bootstrap draws of group means, and confidence intervals.

    The sums have shape (groups, m). The draws have shape (groups, ``N_DRAWS``), and each one is a
    mean over all targets. The intervals are two arrays of the shape of the sums, with the bounds of
    each target's group means. ``improves``, shape (m,), contains the sign of the scores that
    improve each target. Targets are processed in blocks that fit in memory.
    """
    n_targets = len(improves)
    assert spec.runs is not None
    assert spec.loss_weight_power is not None
    # Groups are numbered consecutively over all columns.
    group_sizes = np.concatenate([np.bincount(grouping.numbers) for grouping in groupings]).tolist()
    firsts = np.cumsum([0, *(len(grouping.names) for grouping in groupings)])[:-1]
    numbers = [own.numbers + first for own, first in zip(groupings, firsts, strict=True)]
    n_groups = len(group_sizes)
    run_of = {c: i for i, run in enumerate(spec.runs.values()) for c in run}
    weights = run_weights([run_of[checkpoint] for checkpoint in spec.checkpoints])
    norms = [part.scalar("train_norm") if spec.norm_power is not None else 1.0 for part in parts]
    need = GroupsNeed(n_groups, n_targets, len(parts))
    at_once = need.targets(memory_mb)
    n_train = len(groupings[0].numbers)
    plain = np.empty((n_groups, n_targets))
    ends = np.empty_like(plain), np.empty_like(plain)
    drawn = np.zeros((n_groups, N_DRAWS))
    for first in range(0, n_targets, at_once):
        own = slice(first, min(first + at_once, n_targets))
        sums = GroupSums(n_groups, own.stop - first, Combine(spec.combine), weights)
        for start, stop in blocks_with_progress(n_train, need.rows(memory_mb), "training samples"):
            similarities = np.stack([read(start, stop)[:, own] for read in rows]).astype(np.float64)
            similarities *= improves[own]
            loss_weights = np.stack([
                powered(part.vector("loss_weights", start, stop), spec.loss_weight_power)
                for part in parts
            ])
            groups = [of_column[start:stop] for of_column in numbers]
            sums.add(similarities, loss_weights, norms, groups)
        means = sums.drawn_means()
        plain[:, own] = sums.plain
        for group, size in enumerate(group_sizes):
            draws = means[group].T
            chance = chance_of_samples(draws, size)
            low, high = group_interval(draws, sums.plain[group] / size, chance, len(spec.runs))
            ends[0][group, own], ends[1][group, own] = low, high
        drawn += means.sum(axis=2)
    return plain, drawn / n_targets, ends
