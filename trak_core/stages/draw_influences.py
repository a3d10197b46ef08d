"""Draw some targets of an experiment beside the training samples that help and harm them most."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trak_core.artifacts import SCORES, open_artifact
from trak_core.study.study import Samples, Study, users_code
from trak_core.system.whole_file import written_whole

_TARGETS = 6
_EACH = 4
_GREEN, _RED = "#1b7837", "#b2182b"


def _draw_text(axes: Axes, sample: Sequence[Any] | Mapping[str, Any]) -> None:
    """Print a sample's first numbers, for studies that don't say how to draw one."""
    first = next(iter(sample.values() if isinstance(sample, Mapping) else sample))
    numbers = torch.as_tensor(first).flatten().tolist()
    text = "\n".join(f"{number:.3g}" for number in numbers[:8])
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=7, transform=axes.transAxes)


def _frame(axes: Axes, color: str, title: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=8, color=color)
    for spine in axes.spines.values():
        spine.set_color(color)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def draw_influences(*, figure: Path, scores: Path, study_file: Path) -> None:
    """Write a picture: one row a target, the most helpful and most harmful samples beside it.

    Args:
        figure: The PNG file to write.
        scores: The experiment's scores.
        study_file: The study's Python file; its ``draw(axes, sample)`` draws one sample.
    """
    with open_artifact(scores, SCORES) as file:
        experiment = file.spec["experiment"]
        targets, train = (file.table(key).set_index("id") for key in ("targets", "train"))
        influences = file.table("top_influences")
    loaded = Study.load(study_file)
    draw = loaded.function("draw") if loaded.has("draw") else _draw_text

    def drawn(axes: Axes, samples: Samples, row: int) -> None:
        with users_code(f"{study_file}: drawing a sample"):
            draw(axes, samples[row])

    train_split = loaded.split("train", None)
    train_row = {sample_id: i for i, sample_id in enumerate(train_split.ids)}
    shown = targets.index[:_TARGETS].tolist()
    target_split = loaded.split(experiment, shown)

    width = 1 + 2 * _EACH
    canvas = Figure(figsize=(1.15 * width + 0.6, 1.5 * len(shown) + 0.9), layout="constrained")
    grid = canvas.subplots(len(shown), width, squeeze=False)
    canvas.suptitle(
        f"Experiment {experiment}: targets (left), training samples that push their model output "
        "up most (green) and down most (red)",
        fontsize=10,
    )
    for row, target in enumerate(shown):
        about = targets.loc[target]
        drawn(grid[row, 0], target_split.samples, row)
        title = f"target {target}\nlabel {_shown(about['label'].item())}"
        _frame(grid[row, 0], "black", f"{title}, predicted {_shown(about['prediction'].item())}")
        for sign, first, color in ((1, 1, _GREEN), (-1, 1 + _EACH, _RED)):
            mine = (influences["target_id"] == target) & (influences["sign"] == sign)
            best = influences[mine].head(_EACH)
            rows = list(zip(best["train_id"], best["score"], strict=True))
            for offset in range(_EACH):
                axes = grid[row, first + offset]
                if offset >= len(rows):
                    axes.set_axis_off()
                    continue
                train_id, score = rows[offset]
                drawn(axes, train_split.samples, train_row[train_id])
                label = _shown(train.loc[train_id, "label"].item())
                _frame(axes, color, f"train {train_id}\nlabel {label}, {score:+.2g}")
    # The software version in a PNG's metadata is all that would differ between machines.
    with mpl.rc_context({"savefig.dpi": 110}), written_whole(figure) as partial:
        canvas.savefig(partial, format="png", metadata={"Software": None})
