"""How well the scores predict retraining: the evaluation's rows in order, and its curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trak_core.report.charts import BLUE, GREEN, GREY, ORANGE, Band, Chart, Line, line_chart
from trak_core.report.facts import Measured, Row

_COLORS = (BLUE, ORANGE, GREEN, "#7b3294", "#a6611a", GREY)
_ORDER = {"ceiling": 0, "scores": 1, "baseline": 2}
# Swept settings: column, title of the curve, label of its axis.
_SWEPT = (
    ("damping", "Damping", "damping, in mean squared feature norms"),
    ("proj_dim", "Dimensions of the projection", "k, numbers per gradient"),
    ("loss_weight_power", "Power of the loss weights", "scoring.loss_weight_power"),
)


@dataclass(frozen=True, slots=True)
class Trust:
    """How far an experiment's scores can be trusted.

    Attributes:
        scores: Row of their LDS.
        ceiling: Row of what a perfect method would reach; None where it is unknown.
        reached: Part of the ceiling; None where it is unknown or too uncertain.
    """

    scores: Row
    ceiling: Row | None
    reached: float | None


def trust(measured: Measured) -> Trust:
    """Return an experiment's LDS, beside its ceiling."""
    scores = measured.row("summary", kind="scores")
    ceiling = measured.row("summary", kind="ceiling")
    assert scores is not None
    reached = None
    if ceiling is not None and 0 < ceiling["lds"] >= scores["lds"]:
        reached = max(scores["lds"], 0) / ceiling["lds"]
    return Trust(scores, ceiling, reached)


def ranked(summary: Sequence[Row]) -> list[Row]:
    """Return the ceiling, the scores, and simple rules from the best on."""
    return sorted(summary, key=lambda row: (_ORDER[row["kind"]], -row["lds"]))


def per_target(measured: Measured) -> list[tuple[Any, float, float | None]]:
    """Return each target's id, correlation and ceiling, None where that is unknown."""
    by_method: dict[str, dict[Any, float]] = {"scores": {}, "noise_ceiling": {}}
    for row in measured.tables["targets"]:
        if row["method"] in by_method:
            by_method[row["method"]][row["target_id"]] = row["correlation"]
    ceilings = by_method["noise_ceiling"]
    return [(i, found, ceilings.get(i)) for i, found in by_method["scores"].items()]


def _with_interval(label: str, rows: Sequence[Row], x: str, y: str, color: str) -> Line:
    low, high = ([row[end] for row in rows] for end in ("low", "high"))
    return Line(label, [row[x] for row in rows], [row[y] for row in rows], low, high, color)


def lds_charts(measured: Measured) -> list[Chart]:
    """Return LDS along the number of checkpoints, and along each setting that was swept."""
    ceiling = measured.row("summary", kind="ceiling")
    bands = [Band("ceiling", ceiling["lds"], ceiling["low"], ceiling["high"])] if ceiling else []
    curve = measured.tables["checkpoints"]
    counts = [row["n_checkpoints"] for row in curve]
    # Of a long curve a tick at 1, 2, 5, 10, ... and at its end, which numbers don't overlap.
    ticks = [n for n in counts[:-1] if len(counts) <= 6 or str(n)[0] in "125"] + counts[-1:]
    found = [
        line_chart(
            "More checkpoints",
            [_with_interval("LDS, 95 % interval", curve, "n_checkpoints", "lds", BLUE)],
            x_label="checkpoints averaged",
            y_label="LDS",
            log_x=len(counts) > 1,
            x_ticks=ticks,
            bands=bands,
        )
    ]
    for name, title, label in _SWEPT:
        if len({row[name] for row in measured.tables.get("sweep", ())}) > 1:
            found.append(_sweep_chart(measured, name, title, label, bands))
    return found


def _sweep_chart(
    measured: Measured, name: str, title: str, label: str, bands: Sequence[Band]
) -> Chart:
    """Draw LDS along one setting, the others as in the config, a line for each combine."""
    own = measured.row("best", setting="config")
    assert own is not None
    others = [other for other, _, _ in _SWEPT if other != name]
    along = [r for r in measured.tables["sweep"] if all(r[k] == own[k] for k in others)]
    along.sort(key=lambda row: row[name])
    lines = []
    for combine, color in zip(sorted({r["combine"] for r in along}), _COLORS, strict=False):
        rows = [r for r in along if r["combine"] == combine]
        x, y = [r[name] for r in rows], [r["lds"] for r in rows]
        lines.append(Line(combine.replace("_", " "), x, y, color=color))
    x = sorted({row[name] for row in along})
    return line_chart(
        title,
        lines,
        x_label=label,
        y_label="LDS",
        log_x=name != "loss_weight_power" and x[0] > 0,
        x_ticks=x if len(x) <= 6 else None,
        bands=bands,
    )


def removals_chart(summary: Sequence[Row], labels: Mapping[str, str]) -> Chart:
    """Return how far outputs fall without the most helpful samples, beside random ones.

    Args:
        summary: Rows by number of samples removed.
        labels: In words, what each of the two lines removed.
    """
    lines = [
        _with_interval(labels[removed], rows, "n_removed", "change", color)
        for removed, color in (("top", BLUE), ("random", GREY))
        if (rows := [row for row in summary if row["removed"] == removed])
    ]
    x = sorted({row["n_removed"] for row in summary})
    return line_chart(
        "Change of the model output",
        lines,
        x_label="training examples removed",
        y_label="change of f",
        log_x=len(x) > 1,
        x_ticks=x if len(x) <= 6 else None,
    )
