"""The first screen: what was asked, and how far to trust the answer."""

from collections.abc import Sequence
from typing import Any

from trak_core.model_outputs.table import TABLE
from trak_core.report.elements import Html, element, fixed, joined, paragraph, percent, plural
from trak_core.report.facts import Facts, Measured
from trak_core.report.warnings import Caution
from trak_core.spec import EXACT

_NAMES = 8


def glance(facts: Facts, cautions: Sequence[Caution]) -> Html:
    """Return what was asked, in numbers and words, and how far to trust the scores."""
    config = facts.config
    output = TABLE[config["model_output"]]
    n_targets = len({target["id"] for one in facts.experiments for target in one.targets})
    n_train = facts.experiments[0].n_train
    projection = facts.experiments[0].source.spec["projection"]
    exact = projection["kind"] == EXACT
    numbers: list[tuple[str, Any]] = [
        ("training examples", f"{n_train:,}"),
        ("targets explained", f"{n_targets:,}"),
        ("experiments", f"{len(facts.experiments):,}"),
        ("checkpoints", f"{len(facts.checkpoints):,}"),
        ("parameters", f"{projection['n_params']:,}" if "n_params" in projection else "all"),
        ("projected to", "nothing, exact" if exact else f"{projection['proj_dim']:,} numbers"),
    ]
    tiles = (element("div", element("dt", name), element("dd", value)) for name, value in numbers)
    words = (
        f"The question: which of {n_train:,} training examples pushed {output.name} of "
        f"{plural(n_targets, 'target')} up, and which pushed it down? The answer is one number, a "
        "score, for every pair. "
        f"It was estimated with TRAK from {plural(len(facts.checkpoints), 'trained checkpoint')}."
    )
    return joined([
        paragraph(words),
        element("dl", *tiles, class_="facts"),
        element("h3", "How far to trust it"),
        *(trust(facts)),
        _count(cautions),
    ])


def _count(cautions: Sequence[Caution]) -> Html:
    if not cautions:
        return paragraph(
            "No warnings: see ", element("a", "what was looked for", href="#warnings"), "."
        )
    titles = "; ".join(one.title for one in cautions)
    return element(
        "p",
        element("a", plural(len(cautions), "warning"), href="#warnings"),
        f": {titles}.",
        class_="warning",
    )


def trust(facts: Facts) -> list[Html]:
    """Return what is known of how well the scores predict retraining."""
    if not facts.evaluations:
        return [
            element(
                "p",
                element("b", "It was not measured. "),
                "Nothing in this report says how well the scores predict what retraining would do: "
                "take them as hints of where to look. To measure it, add ",
                element("code", "evaluation:"),
                " to the config (config/README.md has its keys) and run again: models are "
                "retrained on random halves of the training set, and the scores must predict how "
                "their outputs come out.",
                class_="verdict",
            )
        ]
    verdicts = [
        element("p", *_verdict(name, measured), class_="verdict")
        for name, measured in facts.evaluations.items()
    ]
    others = [one.name for one in facts.experiments if one.name not in facts.evaluations]
    if others:
        names = ", ".join(others[:_NAMES]) + (", ..." if len(others) > _NAMES else "")
        verdicts.append(
            paragraph(
                f"Not measured: {plural(len(others), 'other experiment')} ({names}). There the "
                "scores may predict better or worse."
            )
        )
    return verdicts


def _verdict(name: str, measured: Measured) -> list[Any]:
    ours = measured.row("summary", kind="scores")
    best = measured.row("summary", kind="ceiling")
    assert ours is not None
    text: list[Any] = [
        element("b", f"Experiment {name}: LDS {fixed(ours['lds'], 2)}"),
        f", 95 % interval {fixed(ours['low'], 2)} to {fixed(ours['high'], 2)}",
    ]
    if best is None:
        text.append(
            ". How much could be reached at all is unknown: that takes two or more models "
            "retrained on each subset. "
        )
    else:
        text.append(
            f"; a perfect method would reach about {fixed(best['lds'], 2)} "
            f"({fixed(best['low'], 2)} to {fixed(best['high'], 2)}), because retraining itself "
            "is noisy. "
        )
        if 0 < best["lds"] >= ours["lds"]:
            text.append(f"The scores reach {percent(max(ours['lds'], 0) / best['lds'])} of that. ")
        else:
            text.append("That ceiling is too uncertain here to compare with. ")
    attributes = measured.attributes
    text.append(
        f"LDS is the rank correlation, from \N{MINUS SIGN}1 to 1, between what the scores predict "
        f"and what models retrained on {plural(int(attributes['n_subsets']), 'subset')} of the "
        "training set gave; 0 is guessing."
    )
    return text
