"""Draw charts of measurements for the report.

A page shows each chart in its original size. The title and the legend of a chart are not in the
picture: the template templates/macros.html.j2 shows them as text.
"""

import base64
import io
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from trak_core.report.read_results import File, part_with

# The size of a chart in inches. Browsers show an inch of an SVG as 96 CSS pixels, so a font size of
# 9 points makes the text in a chart as large as small text on the page.
_WIDTH, _HEIGHT = 3.6, 2.5
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666",
    "axes.labelcolor": "#222",
    "xtick.color": "#444",
    "ytick.color": "#444",
    "svg.hashsalt": "trak",
}
_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#0b5394", "#b45f06", "#1b7837", "#666666", "#b2182b"
_REMOVED = {
    "top": _BLUE,
    "list": _BLUE,
    "embedding_cosine": _ORANGE,
    "bm25": _GREEN,
    "random": _GREY,
}
_COLORS = (_BLUE, _ORANGE, _GREEN, "#7b3294", "#a6611a", _GREY)
# For each setting that a sweep can vary: its column in the table `sweep`, and the title and the
# label of the x-axis of its chart.
_SWEPT = (
    ("damping", "Damping", "damping, in mean squared feature norms"),
    ("proj_dim", "Dimensions of the projection", "k, numbers per gradient"),
    ("loss_weight_power", "Power of the loss weights", "scoring.loss_weight_power"),
)
# The title of the chart for each quantity that is measured on retrained models.
_MEASURES = {
    "change": "Change of the model output",
    "accuracy": "Accuracy",
    "target_loss": "Loss",
    "output": "Model output",
}
# The largest number of groups in a chart, and of characters in the name of a group.
_GROUPS, _NAME = 25, 22


@dataclass(frozen=True, slots=True)
class Line:
    """A line in a chart, through the points with coordinates ``x`` and ``y``.

    If ``low`` and ``high`` are given, an interval is drawn at each point. A ``dashed`` line has no
    markers.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str = _BLUE
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart as a picture, with its title and legend.

    ``src`` contains the picture as a data URL, and ``alt`` is its alternative text. ``width`` and
    ``height`` are in CSS pixels.
    """

    title: str
    alt: str
    src: str
    width: int
    height: int
    legend: Sequence[Line]


def _draw(axes: Axes, line: Line) -> None:
    if line.low is not None and line.high is not None:
        ends = line.x, line.low, line.high
        if len(line.x) > 1:
            axes.fill_between(*ends, color=line.color, alpha=0.18, linewidth=0)
        else:
            axes.vlines(*ends, color=line.color, linewidth=1.6, alpha=0.6)
    style: dict[str, Any] = (
        {"linestyle": (0, (4, 3))} if line.dashed else {"marker": "o", "markersize": 4}
    )
    axes.plot(line.x, line.y, color=line.color, linewidth=1.6, **style)


def _line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    x_ticks: Sequence[float] | None = None,
    ceiling: Any = None,
) -> Chart:
    """Return a chart of lines.

    If ``ceiling`` is given, the noise ceiling ``lds`` in this row and its interval from ``low`` to
    ``high`` are drawn in grey. By default, the x-axis has ticks at the points of the first line if
    there are at most six.
    """
    if x_ticks is None and len(lines[0].x) <= 6:
        x_ticks = lines[0].x
    legend = [*lines]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        if ceiling:
            axes.axhspan(ceiling.low, ceiling.high, color=_GREY, alpha=0.12, linewidth=0)
            axes.axhline(ceiling.lds, color=_GREY, linestyle=(0, (4, 3)), linewidth=1.2)
            legend.append(Line("ceiling", (), (), color=_GREY, dashed=True))
        for line in lines:
            _draw(axes, line)
        if log_x:
            axes.set_xscale("log")
        if x_ticks is not None:
            axes.xaxis.set_major_locator(FixedLocator(list(x_ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(axis="y", color="#ddd", linewidth=0.6)
        return _chart(title, f"{y_label} against {x_label}", figure, legend)


def _chart(title: str, content: str, figure: Figure, legend: Sequence[Line] = ()) -> Chart:
    """Return a figure as a chart, whose alternative text is the title and ``content``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    width, height = figure.get_size_inches()
    return Chart(
        title=title,
        alt=f"{title}: {content}",
        src=f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}",
        width=round(width * 96),
        height=round(height * 96),
        legend=legend,
    )


def _with_interval(label: str, rows: pd.DataFrame, x: str, y: str, color: str) -> Line:
    return Line(label, *(rows[key].tolist() for key in (x, y, "low", "high")), color=color)


def lds_charts(evaluation: File) -> list[Chart]:
    """Return charts of the LDS against the number of checkpoints and each setting in the sweep."""
    ceiling = evaluation.row("summary", kind="ceiling")
    curve = evaluation.tables["checkpoints"]
    counts = curve["n_checkpoints"].tolist()
    # Labels at all points of a long curve would overlap. Label 1, 2, 5, 10, ... and the last one.
    ticks = [n for n in counts[:-1] if len(counts) <= 6 or str(n)[0] in "125"] + counts[-1:]
    charts = [
        _line_chart(
            "More checkpoints",
            [_with_interval("LDS, 95 % interval", curve, "n_checkpoints", "lds", _BLUE)],
            x_label="checkpoints averaged",
            y_label="LDS",
            log_x=len(counts) > 1,
            x_ticks=ticks,
            ceiling=ceiling,
        )
    ]
    if "sweep" in evaluation.tables:
        swept = [row for row in _SWEPT if len(set(evaluation.tables["sweep"][row[0]])) > 1]
        charts += [_sweep_chart(evaluation, *row, ceiling) for row in swept]
    return charts


def _sweep_chart(evaluation: File, name: str, title: str, label: str, ceiling: Any) -> Chart:
    """Return a chart of the LDS against the setting ``name``, which the sweep varied.

    The other numeric settings have their values in the config. The chart has a line for each value
    of the setting ``combine``.
    """
    config = evaluation.row("best", setting="config")
    others = {other: getattr(config, other) for other, *_ in _SWEPT if other != name}
    sweep = part_with(evaluation.tables["sweep"], **others).sort_values(name, kind="stable")
    lines = [
        Line(str(combine).replace("_", " "), rows[name].tolist(), rows["lds"].tolist(), color=color)
        for (combine, rows), color in zip(sweep.groupby("combine"), _COLORS, strict=False)
    ]
    log_x = name != "loss_weight_power" and lines[0].x[0] > 0
    return _line_chart(title, lines, x_label=label, y_label="LDS", log_x=log_x, ceiling=ceiling)


def removal_charts(removals: File, labels: Mapping[str, str]) -> list[Chart]:
    """Return charts that show how models change if they are retrained on fewer samples.

    Models are retrained either without chosen samples, or only on these. There is a chart for each
    quantity that was measured on the models, such as accuracy. It shows the quantity against the
    number of samples, with a line for the chosen samples and a line for equally many random ones.
    ``labels`` contains words for the legend: for each kind of subset, and under the key ``treated``
    either "removed" or "trained on". If no samples were chosen, there are no charts.
    """
    summary, charts = removals.tables["summary"], []
    measures = [m for m in ("change", "accuracy", "target_loss") if m in set(summary["measure"])]
    for measure in measures or ["output"]:
        rows = part_with(summary, measure=measure).sort_values("n", kind="stable")
        lines = [
            _with_interval(labels[subset], points, "n", "mean", color)
            for subset, color in _REMOVED.items()
            if len(points := part_with(rows, subset=subset))
        ]
        if not lines:
            continue
        x = lines[0].x
        for whole in part_with(rows, subset="everything")["mean"]:
            ends = [x[0], x[-1]] if len(x) > 1 else [0.9 * x[0], 1.1 * x[0]]
            lines.append(Line(labels["everything"], ends, [whole] * 2, color=_ORANGE, dashed=True))
        title, treated = _MEASURES[measure], f"training examples {labels['treated']}"
        chart = _line_chart(title, lines, x_label=treated, y_label=title.lower(), log_x=len(x) > 1)
        charts.append(chart)
    return charts


def group_charts(groups: File) -> list[Chart]:
    """Return a chart for each column by which samples are grouped: the groups' mean scores."""
    charts = []
    for column, rows in groups.tables["groups"].groupby("column", sort=False):
        largest = rows.nlargest(_GROUPS, "n", keep="all").head(_GROUPS)
        shown = largest.sort_values("mean", kind="stable").reset_index(drop=True)
        more = f", the {_GROUPS} largest groups" if len(rows) > _GROUPS else ""
        with mpl.rc_context(_STYLE):
            figure = Figure(figsize=(_WIDTH, 0.9 + 0.2 * len(shown)), layout="constrained")
            axes = figure.subplots()
            axes.axvline(0, color=_GREY, linewidth=0.8)
            axes.hlines(shown.index, shown["low"], shown["high"], color=_BLUE, linewidth=1.6)
            axes.plot(shown["mean"], shown.index, "o", color=_BLUE, markersize=4)
            names = [_shortened(str(name)) for name in shown["group"]]
            axes.set_yticks(shown.index, labels=names, parse_math=False)
            axes.set_ylim(-0.6, len(shown) - 0.4)
            axes.set_xlabel("mean score")
            # If scores are small, the axis shows their power of ten once, to keep labels short.
            axes.locator_params(axis="x", nbins=4)
            axes.ticklabel_format(axis="x", scilimits=(-2, 4))
            axes.grid(axis="x", color="#ddd", linewidth=0.6)
            charts.append(_chart(f"By {column}{more}", f"mean score of each {column}", figure))
    return charts


def _shortened(name: str) -> str:
    """Return a group's name with at most _NAME characters, or half as many if some are wide."""
    is_wide = any(unicodedata.east_asian_width(character) in "WF" for character in name)
    return textwrap.shorten(name, _NAME // 2 if is_wide else _NAME, placeholder=" ...")
