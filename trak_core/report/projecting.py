"""What the projection and the matrices did to the numbers."""

from trak_core.report.elements import Html, joined, number, paragraph, table
from trak_core.report.facts import Facts

_ROWS = 30


def projection(facts: Facts) -> Html:
    """Return the section on condition numbers."""
    spec = facts.experiments[0].source.spec["projection"]
    if spec["kind"] == "exact":
        return paragraph(
            "Nothing was projected: scores come from the exact inner products of all gradients, "
            "what a projection approximates."
        )
    intro = paragraph(
        f"A gradient has {spec['n_params']:,} numbers here, too many to keep for every example. "
        f"A random matrix ({spec['kind']}) turns each into {spec['proj_dim']:,} that keep lengths "
        f"and angles up to chance errors; a single length squared is off by about "
        f"{(2 / spec['proj_dim']) ** 0.5:.1%} (one standard deviation, sqrt(2/k))."
    )
    return joined([intro, _conditions(facts)])


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
