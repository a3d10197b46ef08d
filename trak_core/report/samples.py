"""One sample for the eye: drawn by the study, or printed where that says nothing of it."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

# Twice the size that it is shown at, for screens of high density.
_INCHES, _DPI = 1.0, 200
# Above this a picture is a photograph, which JPEG keeps in a fifth of the room.
_PNG_BYTES = 12_000
_SHOWN, _CHARACTERS = 12, 240


@dataclass(frozen=True, slots=True)
class Picture:
    """A sample, drawn.

    Attributes:
        kind: png or jpeg.
        data: The file's bytes.
        width: In CSS pixels.
        height: Likewise.
        text: What stands below it: what the study's ``describe`` says, if it has one.
    """

    kind: str
    data: bytes
    width: int
    height: int
    text: str = ""

    @property
    def src(self) -> str:
        """The picture itself, as an address."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode()}"


def drawn(draw: Callable[..., Any], sample: Any) -> Picture:
    """Return a sample's picture.

    Args:
        draw: The study's ``draw(axes, sample)``.
        sample: What to draw.
    """
    figure = Figure(figsize=(_INCHES, _INCHES), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    draw(axes, sample)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    png = _saved(figure, format="png", pil_kwargs={"optimize": True}, metadata={"Software": None})
    kind, data = "png", png
    if len(png) > _PNG_BYTES:
        kind, data = "jpeg", _saved(figure, format="jpeg", pil_kwargs={"quality": 85})
    width, height = (int.from_bytes(png[i : i + 4]) for i in (16, 20))  # PNG's own header
    return Picture(kind, data, width // 2, height // 2)


def _saved(figure: Figure, **settings: Any) -> bytes:
    buffer = io.BytesIO()
    # "tight" makes room for what a study writes beside its axes, and cuts empty margins.
    figure.savefig(buffer, bbox_inches="tight", pad_inches=0, **settings)
    return buffer.getvalue()


def printed(sample: Sequence[Any] | Mapping[str, Any]) -> str:
    """Return a sample's entries in a few words: shape and first values of each.

    The label, which stands beside it anyway, is left out of a tuple.

    Args:
        sample: A tuple or a dict, as a study gives it.
    """
    if isinstance(sample, Mapping):
        entries = [(f"{name}: ", value) for name, value in sample.items()]
    else:
        inputs = sample[:-1] if len(sample) > 1 else sample
        entries = [("", value) for value in inputs]
    return "; ".join(name + _values(value) for name, value in entries)


def _values(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + " ..."
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype is torch.bfloat16 else value
    array = np.asarray(value)
    flat = array.reshape(-1)
    numbers = ", ".join(_short(one) for one in flat[:_SHOWN].tolist())
    if array.ndim == 0:
        return numbers
    more = ", ..." if len(flat) > _SHOWN else ""
    size = " x ".join(map(str, array.shape))
    return f"[{numbers}{more}] ({size})" if more or array.ndim > 1 else f"[{numbers}]"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
