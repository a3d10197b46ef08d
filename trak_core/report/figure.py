"""A picture of an experiment's examples, for where no page can be shown: as the page has them."""

import io
import textwrap
import unicodedata

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from trak_core.model_outputs.table import TABLE
from trak_core.report.examples import EACH, Examples
from trak_core.report.numbers import signed
from trak_core.report.samples import Picture
from trak_core.report.words import of_target, of_training_sample

_GREEN, _RED = "#1b7837", "#b2182b"
_TARGETS = 6
# What fits above a tile and in it: characters a line, lines.
_ABOVE, _WITHIN = (22, 2), (17, 9)


def influences_figure(examples: Examples) -> Figure:
    """Return a row a target: the most helpful and the most harmful training samples beside it.

    Args:
        examples: Of one experiment, whose first targets are taken.
    """
    width = 1 + 2 * EACH
    output = TABLE[examples.experiment.source.spec["model_output"]]
    shown = examples.shown[:_TARGETS]
    n_targets = len(shown)
    figure = Figure(figsize=(1.15 * width + 0.6, 1.5 * n_targets + 0.9), layout="constrained")
    figure.suptitle(
        f"Experiment {examples.experiment.name}: targets (left), training samples that push their "
        "model output up most (green) and down most (red)",
        fontsize=10,
        parse_math=False,
    )
    tiles = figure.subplots(n_targets, width, squeeze=False)
    for axes in tiles.flat:
        axes.set_axis_off()
    for row, about in zip(tiles, shown, strict=True):
        target = about["id"]
        words = of_target(about, output)
        _tile(row[0], examples.targets[target], (f"target {target}", words), "black")
        for sign, first, color in ((1, 1, _GREEN), (-1, 1 + EACH, _RED)):
            strongest = examples.strongest(target, sign)[:EACH]
            for axes, one in zip(row[first:], strongest, strict=False):
                said = of_training_sample(one, output), signed(one["score"])
                words = ", ".join(filter(None, said))
                sample = examples.train[one["train_id"]]
                _tile(axes, sample, (f"train {one['train_id']}", words), color)
    return figure


def _wrapped(text: str, characters: int, lines: int) -> str:
    if any(unicodedata.east_asian_width(character) in "WF" for character in text):
        characters //= 2
    return "\n".join(textwrap.wrap(text, characters, max_lines=lines, placeholder=" ..."))


def _tile(axes: Axes, sample: Picture | str, title: tuple[str, str], color: str) -> None:
    """Show a sample in a frame. Nothing in a user's text is taken for a formula."""
    axes.set_axis_on()
    above = "\n".join(_wrapped(line, *_ABOVE) for line in title)
    axes.set_title(above, fontsize=8, color=color, parse_math=False)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(color)
    if isinstance(sample, Picture):
        axes.imshow(imread(io.BytesIO(sample.data), format=sample.kind))
        return
    text = _wrapped(sample, *_WITHIN)
    axes.set_aspect("equal", adjustable="box")
    axes.text(
        0.05,
        0.95,
        text,
        fontsize=7,
        va="top",
        transform=axes.transAxes,
        parse_math=False,
        clip_on=True,
    )
