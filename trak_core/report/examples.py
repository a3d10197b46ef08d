"""Each experiment's targets beside the training samples that moved them most."""

from collections.abc import Mapping, Sequence
from typing import Any

from trak_core.model_outputs.table import TABLE
from trak_core.report.elements import Html, element, joined, number, paragraph, plural
from trak_core.report.facts import Experiment, Row

# Training samples of either sign beside a target; targets of an experiment, and those that show
# without a click; targets in all, which bounds the page's size.
EACH = 4
_TARGETS, _AT_ONCE, _IN_ALL = 20, 4, 120


def targets_shown(n_experiments: int) -> list[int]:
    """Return how many targets of each experiment are shown at most: none of very late ones."""
    each = max(1, min(_TARGETS, _IN_ALL // n_experiments))
    return [each if i * each < _IN_ALL else 0 for i in range(n_experiments)]


def examples(
    experiment: Experiment,
    shown: Sequence[Any],
    targets: Mapping[Any, Html],
    train: Mapping[Any, Html],
    *,
    pictures: bool,
) -> Html:
    """Return one experiment's part of the page.

    Args:
        experiment: Its scores.
        shown: Ids of the targets to show.
        targets: Pictures or prints of these targets.
        train: Pictures or prints of their strongest training samples.
        pictures: Whether samples are drawn; else they are printed.
    """
    blocks = [
        _target(experiment, about, targets, train, pictures=pictures)
        for about in experiment.targets[: len(shown)]
    ]
    first, rest = blocks[:_AT_ONCE], blocks[_AT_ONCE:]
    n_targets = len(experiment.targets)
    left_out = n_targets - len(shown)
    notes = [
        f"{plural(n_targets, 'target')}; each with the {EACH} training samples that push its "
        f"model output up most and the {EACH} that push it down most, as far as there are any."
    ]
    if left_out:
        notes.append(
            f"{plural(left_out, 'target')} more not shown here: {experiment.source.name} has the "
            "scores of all (table top_influences)."
        )
    more = (
        element(
            "details",
            element("summary", f"Show {plural(len(rest), 'more target')}"),
            *rest,
        )
        if rest
        else ""
    )
    return joined([
        element(
            "h3", "Experiment ", element("q", experiment.name), id=f"experiment-{experiment.name}"
        ),
        paragraph(" ".join(notes)),
        *first,
        more,
    ])


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _target(
    experiment: Experiment,
    about: Row,
    targets: Mapping[Any, Html],
    train: Mapping[Any, Html],
    *,
    pictures: bool,
) -> Html:
    target = about["id"]
    output = TABLE[experiment.source.spec["model_output"]]
    spread = f" \N{PLUS-MINUS SIGN} {number(about['output_sd'], 2)}"
    several = len(experiment.checkpoints) > 1
    facts = [
        f"label {_shown(about['label'])}, predicted {_shown(about['prediction'])}",
        element("br"),
        element(
            "span",
            f"f = {number(about['output'])}{spread if several else ''}",
            title=f"f is {output.name}: mean and standard deviation over the checkpoints",
        ),
    ]
    this = element(
        "div",
        element("figure", targets[target]) if pictures else "",
        element(
            "div",
            element("b", f"target {target}"),
            *facts,
            "" if pictures else targets[target],
        ),
        class_="this",
    )
    sides = [_side(experiment, target, sign, train, pictures=pictures) for sign in (1, -1)]
    return element("div", this, *sides, class_="target")


def _side(
    experiment: Experiment,
    target: Any,
    sign: int,
    train: Mapping[Any, Html],
    *,
    pictures: bool,
) -> Html:
    tiles = [
        element(
            "div",
            train[one["train_id"]] if pictures else "",
            element("b", f"{'+' if sign > 0 else ''}{number(one['score'], 2)}"),
            f"train {one['train_id']}",
            element("br"),
            f"label {_shown(one['train_label'])}",
            "" if pictures else train[one["train_id"]],
            class_="tile",
        )
        for one in experiment.strongest.get((target, sign), ())
    ]
    kind = "up" if sign > 0 else "down"
    title = "Most helpful: push f up" if sign > 0 else "Most harmful: push f down"
    return element(
        "div",
        element("h4", title),
        element("div", *tiles, class_="tiles") if tiles else paragraph("none"),
        class_=kind if pictures else f"{kind} printed",
    )
