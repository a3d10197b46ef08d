"""How to read a score, with an example from this very study."""

from trak_core.model_outputs.table import TABLE
from trak_core.report.elements import Html, bullets, element, joined, number, paragraph
from trak_core.report.facts import Experiment, Facts


def reading(facts: Facts) -> Html:
    """Return what a score means, its sign, its unit, and what it doesn't say."""
    output = TABLE[facts.config["model_output"]]
    first = facts.experiments[0]
    relative = first.unit.startswith("relative")
    points = [
        joined([
            element("b", "What it is about. "),
            f"Each target has one number f, the model output: here {output.name}. The larger f, "
            f"{output.meaning}. Its unit: {output.unit}.",
        ]),
        joined([
            element("b", "Sign. "),
            "A positive score: training on this example pushed the target's f up (helpful). A "
            "negative one: it pushed f down (harmful). Near 0: it hardly mattered.",
        ]),
        joined([
            element("b", "Sums. "),
            "Add up the scores of some training examples: the sum predicts how f of the target "
            "moves when a model is trained with them rather than without them.",
        ]),
        joined([
            element("b", "Unit. "),
            "Relative. Compare scores of one target with each other: their order and ratios mean "
            "something. The absolute size doesn't, nor do scores of different targets compare."
            if relative
            else f"That of f itself ({output.unit}).",
        ]),
        joined([
            element("b", "What it is not. "),
            "A score is an estimate to first order, from the gradients of the trained checkpoints; "
            "no model was trained without the example to find it. It is about this model and this "
            "training set, not about whether an example is right or wrong.",
        ]),
    ]
    return joined([
        paragraph(
            "A score answers one question: how much did this training example push this "
            "prediction up or down? There is one for every pair of training example and target."
        ),
        bullets(points),
        _example(first, output.name, relative=relative),
    ])


def _example(experiment: Experiment, output: str, *, relative: bool) -> Html:
    both = (
        (about, up[0], down[0])
        for about in experiment.targets
        if (up := experiment.strongest.get((about["id"], 1)))
        and (down := experiment.strongest.get((about["id"], -1)))
    )
    found = next(both, None)
    if found is None:
        return Html("")
    about, helpful, harmful = found
    ratio = abs(helpful["score"] / harmful["score"])
    stronger = "the helpful one" if ratio >= 1 else "the harmful one"
    times = number(max(ratio, 1 / ratio), 2)
    plus, minus = (number(one["score"], 2) for one in (helpful, harmful))
    return element(
        "p",
        element("b", "Example. "),
        f"Target {about['id']} of experiment {experiment.name} has f = {number(about['output'])} "
        f"({output}). Training sample {helpful['train_id']} has its largest score, "
        f"+{plus}: the estimate says that f would be lower, had the model been trained without it. "
        f"Sample {harmful['train_id']} has the lowest, {minus}: without it f would be higher. "
        + (
            f"The ratio says that {stronger} counts {times} times as much as the other; "
            "how large either is by itself says nothing."
            if relative
            else "Both numbers are in the unit of f."
        ),
        class_="verdict",
    )
