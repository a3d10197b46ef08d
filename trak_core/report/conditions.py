"""What the projection and the matrices did to the numbers."""

from trak_core.report.charts import ORANGE, Line, charts, line_chart
from trak_core.report.elements import Html, element, joined, number, paragraph, percent, table
from trak_core.report.facts import Error, Facts
from trak_core.spec import EXACT
from trak_core.trust.distortion import spread_norm_sd

_ROWS = 30


def projection(facts: Facts) -> Html:
    """Return the section on what the projection distorts, and on condition numbers."""
    spec = facts.experiments[0].source.spec["projection"]
    if spec["kind"] == EXACT:
        return paragraph(
            "Nothing was projected: scores come from the exact inner products of all gradients, "
            "what a projection approximates."
        )
    intro = paragraph(
        f"A gradient has {spec['n_params']:,} numbers here, too many to keep for every example. "
        f"A random matrix ({spec['kind']}) turns each into {spec['proj_dim']:,} that keep lengths "
        f"and angles up to chance errors; a single length squared is off by about "
        f"{percent(spread_norm_sd(spec['proj_dim']), 1)} (one standard deviation, sqrt(2/k))."
    )
    return joined([intro, _distortion(facts), _conditions(facts)])


def _distortion(facts: Facts) -> Html:
    if not facts.distortions:
        return paragraph(
            "These errors were not measured on this study's gradients: ",
            element("code", "distortion: {}"),
            " in the config does that.",
        )
    first = facts.distortions[0]
    kinds = [
        ("squared_norm", "Squared lengths"),
        ("inner_product", "Inner products, relative to both lengths"),
    ]
    rows = [
        (
            one.checkpoint,
            *(
                text
                for error in (one.squared_norm, one.inner_product)
                for text in (
                    f"{percent(error.measured, 2)} \N{PLUS-MINUS SIGN} "
                    f"{percent(error.standard_error, 2)}",
                    percent(error.predicted, 2),
                )
            ),
        )
        for one in facts.distortions[:_ROWS]
    ]
    columns = (
        "checkpoint",
        *("#squared lengths: measured", "#theory"),
        *("#inner products: measured", "#theory"),
    )
    return joined([
        element("h3", "Distortion, measured"),
        paragraph(
            f"{first.n_samples:,} whole gradients were compared with their projections, by "
            f"{first.n_streams:,} independent matrices for each checkpoint. Theory says how large "
            "the errors of such a matrix must be; measured and predicted should agree within "
            "about two standard errors."
        ),
        charts(*(_distortion_chart(facts, kind, title) for kind, title in kinds)),
        table("Relative errors, root mean square, with one standard error", columns, rows),
    ])


def _distortion_chart(facts: Facts, kind: str, title: str) -> Html:
    errors: list[Error] = [getattr(one, kind) for one in facts.distortions]
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


def _conditions(facts: Facts) -> Html:
    damping = facts.config["scoring"]["damping"]
    rows = [
        (
            one.checkpoint,
            number(one.condition(damping)),
            number(one.condition(0)),
            number(one.largest),
            number(one.smallest),
            number(damping * one.mean_squared_norm),
        )
        for one in facts.matrices[:_ROWS]
    ]
    left_out = len(facts.matrices) - len(rows)
    columns = (
        "checkpoint",
        "#condition number, damped",
        "#without damping",
        "#largest eigenvalue",
        "#smallest eigenvalue",
        "#\N{GREEK SMALL LETTER LAMDA} added",
    )
    return joined([
        element("h3", "Condition numbers"),
        paragraph(
            "To turn inner products into influences, each checkpoint's normal matrix is solved "
            "with damping \N{GREEK SMALL LETTER LAMDA} added. Its condition number is the factor "
            "by which rounding errors may grow: up to some thousands is harmless, a million is "
            "not. Damping brings it down, and it also makes the scores better predictions."
        ),
        table(
            "Normal matrices, one a checkpoint; eigenvalues in squared units of the gradients",
            columns,
            rows,
        ),
        paragraph(f"{left_out:,} more checkpoints not shown.") if left_out else "",
    ])
