"""What the projection did to the numbers: theory, and its measured distortion."""

from collections.abc import Sequence

from trak_core.report.charts import ORANGE, Chart, Line, line_chart
from trak_core.report.facts import Distortion, Error


def distortion_charts(distortions: Sequence[Distortion]) -> list[Chart]:
    """Return measured errors beside theory's, of lengths and of inner products."""
    return [
        _chart("Squared lengths", [one.squared_norm for one in distortions]),
        _chart(
            "Inner products, relative to both lengths", [one.inner_product for one in distortions]
        ),
    ]


def _chart(title: str, errors: Sequence[Error]) -> Chart:
    x = range(1, len(errors) + 1)
    measured = [100 * error.measured for error in errors]
    bars = [200 * error.standard_error for error in errors]
    lines = [
        Line(
            "measured, two standard errors either way",
            x,
            measured,
            [m - b for m, b in zip(measured, bars, strict=True)],
            [m + b for m, b in zip(measured, bars, strict=True)],
            joined=False,
        ),
        Line("theory", x, [100 * e.predicted for e in errors], color=ORANGE, dashed=True),
    ]
    return line_chart(
        title,
        lines,
        x_label="checkpoint, in the table's order",
        y_label="relative error, %",
        x_ticks=x if len(x) <= 12 else None,
    )
