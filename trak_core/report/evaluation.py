"""How well the scores predict retraining: the tables and curves of the evaluation."""

from collections.abc import Sequence

from trak_core.report.charts import BLUE, GREEN, GREY, ORANGE, Band, Line, charts, line_chart
from trak_core.report.elements import (
    Html,
    element,
    fixed,
    joined,
    number,
    paragraph,
    percent,
    plural,
    table,
)
from trak_core.report.facts import Facts, Measured, Row

_COLORS = (BLUE, ORANGE, GREEN, "#7b3294", "#a6611a", GREY)
_TARGETS = 20
_METHODS = {
    "scores": "these scores",
    "random": "random numbers",
    "same_class": "same label: 1, else 0",
    "gradient_dot": "inner products of gradients",
    "embedding_cosine": "cosine of embeddings",
    "noise_ceiling": "ceiling: what a perfect method would reach, estimated",
}
# Swept settings: column, title of the curve, label of its axis.
_SWEPT = (
    ("damping", "Damping", "damping, in mean squared feature norms"),
    ("proj_dim", "Dimensions of the projection", "k, numbers per gradient"),
    ("loss_weight_power", "Power of the loss weights", "scoring.loss_weight_power"),
)


def evaluation(facts: Facts) -> Html:
    """Return the section; where nothing was measured it says so."""
    parts = [
        *(_lds(name, measured) for name, measured in facts.evaluations.items()),
        *(_removals(name, measured) for name, measured in facts.removals.items()),
        *(_flipped(measured) for measured in facts.flipped),
        *(_self_influence(measured) for measured in facts.self_influence),
    ]
    if facts.evaluations:
        return joined([_what_lds_is(), *parts])
    nothing = paragraph(
        "The scores were not compared with retrained models: the config has no ",
        element("code", "evaluation:"),
        " with an LDS in it.",
    )
    return joined([nothing, *parts])


def _what_lds_is() -> Html:
    return paragraph(
        "LDS, the linear datamodeling score: models are retrained on subsets of the training set. "
        "For each subset the scores predict, by their sum over it, how a target's output comes "
        "out; the retrained models say how it did. The rank correlation of the two over the "
        "subsets, averaged over targets, is the LDS: 1 is a perfect order, 0 is guessing."
    )


def _method(row: Row) -> str:
    if row["kind"] == "trak":
        return f"TRAK 0.3.2's formula, no damping, k = {row['proj_dim']:,}"
    return _METHODS.get(row["method"]) or row["method"]


def _lds(name: str, measured: Measured) -> Html:
    order = {"ceiling": 0, "scores": 1, "trak": 2, "baseline": 3}
    rows = sorted(measured.tables["summary"], key=lambda r: (order.get(r["kind"], 4), -r["lds"]))
    attributes = measured.attributes
    return joined([
        element("h3", f"LDS of experiment {name}"),
        paragraph(
            f"{plural(int(attributes['n_subsets']), 'subset')}, each with "
            f"{plural(int(attributes['n_seeds']), 'seed')}; "
            f"{plural(int(attributes['n_targets']), 'target')}. Intervals hold "
            f"{percent(attributes['confidence'])} of bootstrap draws over subsets and targets "
            "together."
        ),
        table(
            "Rank correlation with retrained models, mean over targets",
            ("what predicts", "#LDS", "#from", "#to"),
            [(_method(r), *_three(r, "lds", "low", "high")) for r in rows],
        ),
        charts(*_curves(measured)),
        _best(measured),
        _per_target(measured),
    ])


def _three(row: Row, *columns: str) -> list[str]:
    """Return correlations with three decimals."""
    return [fixed(row[column], 3) for column in columns]


def _with_interval(label: str, rows: Sequence[Row], x: str, y: str, color: str) -> Line:
    low, high = ([r[end] for r in rows] for end in ("low", "high"))
    return Line(label, [r[x] for r in rows], [r[y] for r in rows], low, high, color)


def _curves(measured: Measured) -> list[Html]:
    ceiling = measured.row("summary", kind="ceiling")
    bands = [Band("ceiling", ceiling["lds"], ceiling["low"], ceiling["high"])] if ceiling else []
    curve = measured.tables["checkpoints"]
    counts = [r["n_checkpoints"] for r in curve]
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
        if len({r[name] for r in measured.tables.get("sweep", ())}) > 1:
            found.append(_sweep_curve(measured, name, title, label, bands))
    return found


def _sweep_curve(
    measured: Measured, name: str, title: str, label: str, bands: Sequence[Band]
) -> Html:
    """Draw LDS along one setting, the others as in the config, a line for either combine."""
    own = measured.row("best", setting="config")
    assert own is not None
    others = [other for other, _, _ in _SWEPT if other != name]
    along = [r for r in measured.tables["sweep"] if all(r[k] == own[k] for k in others)]
    along.sort(key=lambda r: r[name])
    lines = []
    for combine, color in zip(sorted({r["combine"] for r in along}), _COLORS, strict=False):
        rows = [r for r in along if r["combine"] == combine]
        x, y = [r[name] for r in rows], [r["lds"] for r in rows]
        lines.append(Line(combine.replace("_", " "), x, y, color=color))
    x = sorted({r[name] for r in along})
    return line_chart(
        title,
        lines,
        x_label=label,
        y_label="LDS",
        log_x=name != "loss_weight_power" and x[0] > 0,
        x_ticks=x if len(x) <= 6 else None,
        bands=bands,
    )


def _best(measured: Measured) -> Html:
    if "best" not in measured.tables:
        return Html("")
    rows = [
        (
            "best of the sweep" if r["setting"] == "best" else "this config",
            number(r["damping"]),
            number(r["loss_weight_power"]),
            r["combine"].replace("_", " "),
            f"{r['proj_dim']:,}",
            *_three(r, "lds_chosen_by", "lds_reported", "low", "high"),
        )
        for r in measured.tables["best"]
    ]
    columns = (
        *("setting", "#damping", "#loss weight power", "combine", "#k"),
        *("#LDS, chosen by", "#LDS, reported", "#from", "#to"),
    )
    return joined([
        paragraph(
            "The best setting was chosen on every other target, and is reported on the rest: a "
            "number that a choice was made by is too good to be true."
        ),
        table("Settings compared", columns, rows),
    ])


def _per_target(measured: Measured) -> Html:
    rows = measured.tables["targets"]
    ours = {r["target_id"]: r["correlation"] for r in rows if r["method"] == "scores"}
    top = {r["target_id"]: r["correlation"] for r in rows if r["method"] == "noise_ceiling"}
    shown = [
        (str(i), fixed(found, 2), fixed(top[i], 2) if i in top else "not known")
        for i, found in list(ours.items())[:_TARGETS]
    ]
    more = len(ours) - len(shown)
    return element(
        "details",
        element("summary", "Show the targets one by one"),
        paragraph("The ceiling of a single target is a rough estimate: some come out above theirs.")
        if top
        else "",
        table("Rank correlation of each target", ("target", "#these scores", "#ceiling"), shown),
        paragraph(f"{plural(more, 'target')} more are in {measured.source.name}.") if more else "",
    )


def _removals(name: str, measured: Measured) -> Html:
    summary = sorted(measured.tables["summary"], key=lambda r: r["n_removed"])
    drawn = {"top": "those that the scores call most helpful", "random": "random ones"}
    labels = {**drawn, "difference": "the most helpful, beyond random ones"}
    lines = [
        _with_interval(label, rows, "n_removed", "change", color)
        for (removed, label), color in zip(drawn.items(), (BLUE, GREY), strict=True)
        if (rows := [r for r in summary if r["removed"] == removed])
    ]
    x = sorted({r["n_removed"] for r in summary})
    flips = all("flips" in r for r in summary)
    columns = ("removed", "#how many", "#change of f", "#from", "#to")
    rows = [
        (
            labels[r["removed"]],
            f"{r['n_removed']:,}",
            *(number(r[column]) for column in ("change", "low", "high")),
            *([percent(r["flips"])] if flips else ()),
        )
        for r in summary
    ]
    return joined([
        element("h3", f"Without the most helpful examples: experiment {name}"),
        paragraph(
            "The test that needs no theory: take away the training examples that a target's scores "
            "call most helpful, retrain, and see how far its output falls, beside taking away as "
            "many at random. All are compared with the same few models trained on everything; "
            "their luck shifts every row but the last ones, where it cancels."
        ),
        charts(
            line_chart(
                "Change of the model output",
                lines,
                x_label="training examples removed",
                y_label="change of f",
                log_x=len(x) > 1,
                x_ticks=x if len(x) <= 6 else None,
            )
        ),
        table(
            "Mean over targets and trainings, with a 95 % interval over both",
            (*columns, "#another class predicted") if flips else columns,
            rows,
        ),
    ])


def _flipped(measured: Measured) -> Html:
    names = {"self_influence": "self-influence", "loss_weight": "loss weight"}
    rows = [
        (names.get(r["method"], r["method"]), f"{r['auc']:.3f}", percent(r["found"]))
        for r in measured.tables["detection"]
    ]
    flipped = measured.attributes["n_flipped"]
    return joined([
        element("h3", "Finding wrong labels"),
        paragraph(
            f"{plural(flipped, 'training example')} got a wrong label on purpose, and models were "
            "trained on that. Examples that a model can only learn by heart influence themselves "
            "most: sorted by self-influence, wrong labels should come first."
        ),
        table(
            "AUC: the chance that a wrong label comes before a right one (0.5 is guessing); found: "
            "part of the wrong labels among as many examples from the top",
            ("sorted by", "#AUC", "#found"),
            rows,
        ),
    ])


def _self_influence(measured: Measured) -> Html:
    rows = [
        (r["id"], r["label"], r["prediction"], number(r["self_influence"]))
        for r in measured.tables["largest"]
    ]
    return joined([
        element("h3", "Self-influence"),
        paragraph(
            "How much each training example pushes its own output, up or down: the largest are "
            "examples that nothing else explains, among them wrong labels and oddities. Worth a "
            "look by eye."
        ),
        table(
            f"The largest; all are in {measured.source.name}",
            ("training example", "label", "predicted", "#self-influence"),
            rows,
        ),
    ])
