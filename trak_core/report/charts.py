"""Line charts as pictures inside the page: small, each read at its own size on any screen.

Title and legend are text around the picture (templates/macros.html.j2).
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

# Inches; an SVG's inch is 96 CSS pixels, so that the text is as large as the page's small print.
_WIDTH, _HEIGHT = 3.6, 2.5
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666",
    "axes.labelcolor": "#222",
    "xtick.color": "#444",
    "ytick.color": "#444",
    "svg.hashsalt": "trak",
}
BLUE, ORANGE, GREEN, GREY = "#0b5394", "#b45f06", "#1b7837", "#666666"


@dataclass(frozen=True, slots=True)
class Line:
    """Points that belong together.

    Attributes:
        label: What they are.
        x: Where.
        y: How much.
        low: Lower ends of intervals, if there are any.
        high: Upper ends.
        color: Of the line.
        dashed: Whether it is a reference, without marks.
        joined: Whether points follow from each other; else each stands alone, with its interval.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str = BLUE
    dashed: bool = False
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Band:
    """A level to compare with, with its interval."""

    label: str
    value: float
    low: float
    high: float
    color: str = GREY
    dashed: bool = True


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, ready to be shown.

    Attributes:
        title: Above it.
        alt: What it shows, for who can't see it.
        src: The picture itself, as an address.
        width: In CSS pixels.
        height: Likewise.
        legend: What was drawn.
    """

    title: str
    alt: str
    src: str
    width: int
    height: int
    legend: Sequence[Line | Band]


def _draw(axes: Axes, line: Line) -> None:
    together = line.joined and len(line.x) > 1
    if line.low is not None and line.high is not None:
        if together:
            axes.fill_between(
                line.x, line.low, line.high, color=line.color, alpha=0.18, linewidth=0
            )
        else:
            axes.vlines(line.x, line.low, line.high, color=line.color, linewidth=1.6, alpha=0.6)
    (drawn,) = axes.plot(line.x, line.y, color=line.color, linewidth=1.6)
    if line.dashed:
        drawn.set_linestyle((0, (4, 3)))
    else:
        drawn.set(marker="o", markersize=4, linestyle="-" if together else "none")


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[float] | None = None,
    bands: Sequence[Band] = (),
) -> Chart:
    """Return a chart of lines, and of levels to compare with.

    Args:
        title: Above it, and the picture's description.
        lines: What to draw.
        x_label: Quantity and unit.
        y_label: Likewise.
        log_x: Whether x is spaced by ratios.
        log_y: Likewise for y.
        x_ticks: Where to put ticks; None leaves it to matplotlib.
        bands: Levels drawn behind the lines.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        for band in bands:
            axes.axhspan(band.low, band.high, color=band.color, alpha=0.12, linewidth=0)
            axes.axhline(band.value, color=band.color, linestyle=(0, (4, 3)), linewidth=1.2)
        for line in lines:
            _draw(axes, line)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        if x_ticks is not None:
            axes.xaxis.set_major_locator(FixedLocator(list(x_ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(axis="y", color="#ddd", linewidth=0.6)
        axes.set_axisbelow(True)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Chart(
        title=title,
        alt=f"{title}: {y_label} against {x_label}",
        src=f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue()).decode()}",
        width=round(_WIDTH * 96),
        height=round(_HEIGHT * 96),
        legend=[*lines, *bands],
    )
