"""Sum an experiment's scores over groups of training samples, and compute confidence intervals."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from trak_core.artifacts import (
    FEATURES,
    GROUPS,
    SCORES,
    check_same,
    create,
    open_artifact,
    software,
)
from trak_core.evaluation.intervals import CONFIDENCE
from trak_core.lists.groups import N_DRAWS, Grouping, group_tables, sums_of_groups
from trak_core.settings import ScoresSpec
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
    """Write the sum and the mean of each group's scores, and the differences between means.

    A group consists of the training samples that have the same value in a column. ``group_by``
    contains the names of the columns, which are in the table ``train`` of the file ``scores``. If
    the table ``targets`` of this file has a column ``improves``, which contains 1 or -1, scores are
    multiplied by it, so that positive scores improve a target. Scores are computed from
    ``checkpoint_scores``, and with ``keep: top_k`` also from ``features``.
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
        assert spec.runs is not None
        n_targets, n_runs = len(target_ids), len(spec.runs)
        improves = targets["improves"] if "improves" in targets else np.ones(n_targets)
        sums = sums_of_groups(parts, rows, spec, groupings, np.asarray(improves), memory_mb)
        table, targets, differences = group_tables(groupings, *sums, target_ids, n_runs)
        file_spec = spec.as_dict() | {"scores": scores_hash, "groups": list(group_by)}
        made_by = software(code, "cpu", "numpy", "scipy", "pandas")
        counts = {"n_draws": N_DRAWS, "n_runs": n_runs, "n_targets": n_targets}
        with create(groups, GROUPS, file_spec, made_by, confidence=CONFIDENCE, **counts) as writer:
            writer.table("groups", table, ["column", "group"])
            writer.table("targets", targets, ["column", "group", "target_id"])
            if len(differences):
                writer.table("differences", differences, ["column", "group", "other"])
    print(table.to_string(index=False))
