"""Write the report of a study as one HTML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trak_core.artifacts import EVALUATION, GROUPS, REMOVALS
from trak_core.errors import InputError
from trak_core.report.describe_samples import EACH, find_examples, targets_shown
from trak_core.report.read_results import (
    Results,
    read_experiment,
    read_matrix,
    read_measured,
    read_self_influence,
    side_by_side,
    with_class_names,
)
from trak_core.report.render import rendered
from trak_core.runtime.files import atomic_write
from trak_core.settings import TRAIN
from trak_core.study.read_targets import split_of
from trak_core.study.study import Study


def _check_scores(results: Results) -> None:
    scores = {file.spec["experiment"]: file for file in results.experiments}
    for file in (*results.evaluations.values(), *results.removals, *results.groups.values()):
        expected, measured = scores[file.spec["experiment"]], file.spec["scores"]
        if measured != expected.content_hash:
            raise InputError(
                f"{file.name} must be computed from {expected.name}, whose hash is "
                f"{expected.content_hash}. Found scores with the hash {measured}. Delete "
                f"{file.name} and run Snakemake again.",
                code="report.other_scores",
            )


def write_report(
    *,
    report: Path,
    scores: Sequence[Path],
    normal_matrices: Sequence[Path],
    evaluations: Sequence[Path],
    removals: Sequence[Path],
    self_influence: Sequence[Path],
    groups: Sequence[Path] = (),
    study_file: Path,
    config: dict[str, Any],
) -> None:
    """Write a report on the results of a study, as an HTML file. Equal files give equal reports.

    ``scores``, ``evaluations`` and ``groups`` contain a file for each experiment, and
    ``normal_matrices`` contains a file for each checkpoint. ``removals`` contains a file for the
    experiment from whose scores samples were removed, and one for each list. ``self_influence``
    contains at most one file. If the config does not request a kind of results, the argument for
    its files is empty. ``config`` is the part of the config that determines the results. The
    study's ``draw`` and ``describe`` determine how samples are shown.

    ``report`` is a path in the results folder.
    """
    folder = report.parent
    study = Study.load(study_file)
    train, names = study.split(TRAIN, None), study.class_names()
    # How well the model fits the training data is the same for all experiments, so it is computed
    # only for the first experiment.
    experiments = [
        with_class_names(read_experiment(path, folder, n_shown, EACH, None if i else train), names)
        for i, (path, n_shown) in enumerate(zip(scores, targets_shown(len(scores)), strict=True))
    ]
    if fit := experiments[0].attributes["fit"]:
        print(fit.measure)
    results = Results(
        config=config,
        experiments=experiments,
        matrices=[read_matrix(path, folder) for path in normal_matrices],
        evaluations={path.stem: read_measured(path, folder, EVALUATION) for path in evaluations},
        removals=[read_measured(path, folder, REMOVALS) for path in removals],
        self_influence=[
            with_class_names(read_self_influence(path, folder), names) for path in self_influence
        ],
        groups={
            path.stem: with_class_names(read_measured(path, folder, GROUPS), names)
            for path in groups
        },
    )
    _check_scores(results)
    targets = []
    for file in experiments:
        data = config["experiments"][file.spec["experiment"]].get("data")
        ids = file.tables["shown"]["id"].tolist()
        targets.append(split_of(study, file.spec["experiment"], ids, data and Path(data)))
    shared = side_by_side(experiments)
    shared_ids = [sample["id"] for sample in shared]
    examples = find_examples(study, experiments, train, targets, also=shared_ids)
    page = rendered(
        "report",
        results=results,
        examples=examples,
        shared=shared,
        each=EACH,
        study=study.name,
        first=(train.ids[0], study.first_as_read(train)),
    )
    with atomic_write(report) as partial:
        partial.write_text(page, encoding="utf-8")
