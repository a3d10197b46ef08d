"""Write the report of a study: one page that needs nothing beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trak_core.errors import InputError
from trak_core.report.examples import EACH, find_examples, targets_shown
from trak_core.report.facts import Facts, Measured
from trak_core.report.read import (
    read_distortion,
    read_evaluation,
    read_experiment,
    read_flipped,
    read_matrix,
    read_removals,
    read_self_influence,
)
from trak_core.report.render import document
from trak_core.report.timings import read_timings
from trak_core.study.study import TRAIN, Study
from trak_core.system.files import written_whole


def _check_scores_of(name: str, measured: Measured, facts: Facts) -> None:
    """Refuse what was measured of other scores than are shown; Snakemake may know nothing of it."""
    (scores,) = (one.source for one in facts.experiments if one.name == name)
    found = measured.source.spec["scores"]
    if found != scores.content_hash:
        raise InputError(
            f"{measured.source.name} must be about the scores in {scores.name}, with the hash "
            f"{scores.content_hash}. Found {found}. Delete it and run snakemake again."
        )


def write_report(
    *,
    report: Path,
    scores: Sequence[Path],
    normal_matrices: Sequence[Path],
    distortion: Sequence[Path],
    evaluations: Sequence[Path],
    removals: Sequence[Path],
    flipped: Sequence[Path],
    self_influence: Sequence[Path],
    study_file: Path,
    config: dict[str, Any],
) -> None:
    """Read what a study left, and write the report; the same artifacts give the same page.

    Args:
        report: The HTML file to write, in the results folder; Snakemake's measurements are read
            from ``benchmarks`` beside it, and jobs' own from ``logs``.
        scores: Of each experiment.
        normal_matrices: Of each checkpoint; empty without a projection.
        distortion: Of each checkpoint; this and the following are empty where not asked for.
        evaluations: Of each experiment that was measured.
        removals: Of each experiment with one.
        flipped: At most one.
        self_influence: At most one.
        study_file: The study's Python file; its ``draw(axes, sample)`` draws one sample.
        config: What decides the numbers.

    Raises:
        InputError: If a file is not what it must be.
    """
    results = report.parent
    shown = targets_shown(len(scores))
    experiments = [
        read_experiment(path, results, n_shown, EACH)
        for path, n_shown in zip(scores, shown, strict=True)
    ]
    known = {
        TRAIN,
        *experiments[0].checkpoints,
        *experiments[0].runs,
        *(one.name for one in experiments),
    }
    facts = Facts(
        config=config,
        experiments=experiments,
        matrices=[read_matrix(path, results) for path in normal_matrices],
        timings=read_timings(results / "benchmarks", results / "logs", known),
        evaluations={path.stem: read_evaluation(path, results) for path in evaluations},
        removals={path.stem: read_removals(path, results) for path in removals},
        flipped=[read_flipped(path, results) for path in flipped],
        self_influence=[read_self_influence(path, results) for path in self_influence],
        distortions=[read_distortion(path, results) for path in distortion],
    )
    for measured in (*facts.evaluations.items(), *facts.removals.items()):
        _check_scores_of(*measured, facts)
    asked = config["experiments"]
    questions = {name: Path(one["data"]) for name, one in asked.items() if "data" in one}
    examples = find_examples(Study.load(study_file), experiments, shown, questions)
    text = document(facts, examples)
    with written_whole(report) as partial:
        partial.write_text(text, encoding="utf-8")
