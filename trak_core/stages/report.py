"""Write the report of a study: one page that needs nothing beside it."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trak_core.artifacts import (
    COUNTERFACTUAL,
    DIAGNOSTICS,
    EVALUATION,
    MISLABELLED,
    NORMAL_MATRIX,
    SCORES,
    SELF_INFLUENCE,
    Artifact,
    ArtifactError,
    Kind,
    open_artifact,
)
from trak_core.report.cautions import SATURATED
from trak_core.report.document import document
from trak_core.report.elements import Html, joined
from trak_core.report.examples import EACH, examples, targets_each
from trak_core.report.facts import (
    Distortion,
    Error,
    Experiment,
    Facts,
    Matrix,
    Measured,
    Source,
)
from trak_core.report.samples import drawn, printed
from trak_core.stages.timings import read_timings
from trak_core.study import TRAIN, Study
from trak_core.whole_file import written_whole

_ATTRIBUTES = ("n_subsets", "n_seeds", "n_targets", "confidence")
_LARGEST = 10


def _source(artifact: Artifact, results: Path) -> Source:
    name = artifact.path.relative_to(results).as_posix()
    return Source(name, artifact.content_hash, artifact.provenance, artifact.spec)


def _table(path: Path, key: str) -> pd.DataFrame:
    table = pd.read_hdf(path, key)
    assert isinstance(table, pd.DataFrame)
    return table


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def _experiment(path: Path, results: Path, n_shown: int) -> Experiment:
    with open_artifact(path, SCORES) as file:
        source, unit = _source(file, results), file.attribute("unit")
    targets, train = (_table(path, key) for key in ("targets", "train"))
    if "loss_weight" not in train or "margin_sd" not in targets:
        raise ArtifactError(
            f"{path}: the report needs the columns margin_sd and loss_weight, which scores of "
            "earlier versions don't have. Delete the file and run snakemake again: rule "
            f"{SCORES.rule} remakes it."
        )
    influences = _table(path, "top_influences")
    shown = influences["target_id"].isin(targets["id"].head(n_shown))
    strongest: dict[tuple[Any, int], list[dict[str, Any]]] = defaultdict(list)
    for row in _rows(influences.loc[shown & (influences["rank"] <= EACH)]):
        strongest[row["target_id"], row["sign"]].append(row)
    return Experiment(
        name=source.spec["experiment"],
        source=source,
        unit=unit,
        n_train=len(train),
        saturated=float(np.mean(np.abs(train["loss_weight"].to_numpy()) < SATURATED)),
        targets=_rows(targets),
        strongest=strongest,
    )


def _matrix(path: Path, results: Path) -> Matrix:
    with open_artifact(path, NORMAL_MATRIX) as file:
        return Matrix(
            file.spec["checkpoint"]["id"],
            _source(file, results),
            file.scalar("smallest_eigenvalue"),
            file.scalar("largest_eigenvalue"),
            file.scalar("mean_squared_norm"),
            int(file.scalar("n_train")),
        )


def _distortion(path: Path, results: Path) -> Distortion:
    with open_artifact(path, DIAGNOSTICS) as file:
        names = file.columns("agreement")
        errors = {
            kind: Error(**dict(zip(names, row, strict=True)))
            for kind, row in zip(
                file.index("agreement"), file.matrix("agreement")[:].tolist(), strict=True
            )
        }
        return Distortion(
            checkpoint=file.spec["checkpoint"]["id"],
            source=_source(file, results),
            n_samples=len(file.vector("sample_ids")),
            n_streams=file.attribute("n_streams"),
            **errors,
        )


def _measured(path: Path, kind: Kind, results: Path, *tables: str, **counts: int) -> Measured:
    """Read the tables that a file has out of those asked for, and its numbers."""
    with open_artifact(path, kind) as file:
        source = _source(file, results)
        found = [key for key in tables if file.has(key)]
        numbers = {key: file.attribute(key) for key in _ATTRIBUTES if key in file.file.attrs}
    rows = {key: _rows(_table(path, key)) for key in found}
    return Measured(source, rows, numbers | counts)


def _evaluation(path: Path, results: Path) -> Measured:
    tables = "summary", "targets", "checkpoints", "sweep", "best"
    return _measured(path, EVALUATION, results, *tables)


def _mislabelled(path: Path, results: Path) -> Measured:
    flipped = int(_table(path, "train")["flipped"].to_numpy().sum())
    return _measured(path, MISLABELLED, results, "detection", n_flipped=flipped)


def _self_influence(path: Path, results: Path) -> Measured:
    with open_artifact(path, SELF_INFLUENCE) as file:
        source = _source(file, results)
    train = _table(path, "train")
    largest = train.sort_values("self_influence", ascending=False, kind="stable").head(_LARGEST)
    return Measured(source, {"largest": _rows(largest)}, {})


def _examples(study: Path, experiments: list[Experiment], n_shown: int) -> Html:
    """Show targets and their strongest training samples, each drawn or printed once."""
    loaded = Study.load(study)
    draw = loaded.function("draw") if loaded.has("draw") else None

    def show(sample: Any, description: str) -> Html:
        if draw is None:
            return Html(joined([printed(sample)]))
        return drawn(draw, sample, description)

    train_split = loaded.split(TRAIN, None)
    row_of = {sample_id: row for row, sample_id in enumerate(train_split.ids)}
    train: dict[Any, Html] = {}
    parts = []
    for experiment in experiments:
        ids = [about["id"] for about in experiment.targets[:n_shown]]
        split = loaded.split(experiment.name, ids)
        targets = {i: show(split.samples[row], f"target {i}") for row, i in enumerate(ids)}
        for best in experiment.strongest.values():
            for i in (one["train_id"] for one in best):
                if i not in train:
                    train[i] = show(train_split.samples[row_of[i]], f"training example {i}")
        parts.append(examples(experiment, ids, targets, train, pictures=draw is not None))
    return joined(parts)


def write_report(
    *,
    report: Path,
    scores: Sequence[Path],
    normal_matrices: Sequence[Path],
    diagnostics: Sequence[Path],
    evaluations: Sequence[Path],
    counterfactuals: Sequence[Path],
    mislabelled: Sequence[Path],
    self_influence: Sequence[Path],
    study: Path,
    config: dict[str, Any],
) -> None:
    """Read what a study left, and write the report; the same artifacts give the same page.

    Args:
        report: The HTML file to write, in the results folder; Snakemake's measurements are read
            from ``benchmarks`` beside it.
        scores: Of each experiment.
        normal_matrices: Of each checkpoint; empty without a projection.
        diagnostics: Of each checkpoint; this and the following are empty where not asked for.
        evaluations: Of each experiment that was measured.
        counterfactuals: Of each experiment with one.
        mislabelled: At most one.
        self_influence: At most one.
        study: The study's Python file; its ``draw(axes, sample)`` draws one sample.
        config: What decides the numbers.

    Raises:
        InputError: If a file is not what it must be.
    """
    results = report.parent
    n_shown = targets_each(len(scores))
    experiments = [_experiment(path, results, n_shown) for path in scores]
    known = {TRAIN, *experiments[0].checkpoints, *(one.name for one in experiments)}
    facts = Facts(
        config=config,
        experiments=experiments,
        matrices=[_matrix(path, results) for path in normal_matrices],
        timings=read_timings(results / "benchmarks", known),
        evaluations={path.stem: _evaluation(path, results) for path in evaluations},
        counterfactuals={
            path.stem: _measured(path, COUNTERFACTUAL, results, "summary")
            for path in counterfactuals
        },
        mislabelled=[_mislabelled(path, results) for path in mislabelled],
        self_influence=[_self_influence(path, results) for path in self_influence],
        distortions=[_distortion(path, results) for path in diagnostics],
    )
    text = document(facts, _examples(study, experiments, n_shown))
    with written_whole(report) as partial:
        partial.write_text(text, encoding="utf-8")
