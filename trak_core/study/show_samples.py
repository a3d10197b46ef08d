"""Show samples on HTML pages and in notebooks, as pictures, texts or printed values."""

import base64
import hashlib
import html
import io
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from trak_core.data.row_files import FromRow
from trak_core.study.dataset_split import Split, users_code
from trak_core.study.study import Study

# The number of characters to which texts are shortened in tables and notebooks.
SHORTENED = 200
# The longer side of a picture has about 200 pixels. Pages show it with half as many CSS pixels, so
# that it is sharp on high-density screens.
_INCHES, _DPI = 1.0, 200
# A larger PNG is probably a photograph. It is saved as a JPEG, which needs a fifth of the space.
_PNG_BYTES = 12_000
_LEFT = "\N{LEFT-TO-RIGHT MARK}"  # An invisible character that marks cells to be aligned left.
_NOTEBOOK_PIXELS = 64  # The height of a picture in a notebook.
_N_VALUES, _CHARACTERS = 12, 240  # The largest numbers of values and of characters to print.
# Python counts these characters as unprintable, but some scripts and emoji need them.
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a sample, its size in CSS pixels, and the text to show below it.

    ``kind`` is png or jpeg, and ``data`` is the content of the image file. ``text`` is the result
    of the study's ``describe``, or "" if the study does not define it.
    """

    kind: str
    data: bytes
    width: int
    height: int
    text: str = ""

    @property
    def src(self) -> str:
        """A data URL that contains the picture, for the attribute ``src`` of an HTML image."""
        return f"data:image/{self.kind};base64,{base64.b64encode(self.data).decode()}"


def are_drawn(study: Study, train: Split) -> bool:
    """Return whether samples are shown as pictures: they are images, or the study has ``draw``."""
    return study.has("draw") or _pixels(train.sample(0)) is not None


def show_sample(
    study: Study, sample_id: Any, sample: Any, characters: int, draws: bool
) -> Picture | str:
    """Return a picture of a sample, or the text to show if no picture can be made.

    The text is the result of the study's ``describe``, shortened to ``characters`` characters, or
    a list of the sample's values if the study does not define ``describe``. A picture contains the
    text from ``describe``, too. ``draws`` is the result of ``are_drawn``.
    """
    describes = study.has("describe")
    text = readable(study.describe(sample_id, sample), characters) if describes else ""
    if draws and text in study.class_names():
        text = ""  # The text is only the name of a class, which pages show anyway.
    if study.has("draw"):
        with users_code(f"{study.path}: drawing a sample"):
            return replace(drawn(study.function("draw"), sample), text=text)
    if draws and (pixels := _pixels(sample)) is not None:
        return replace(_picture_of(pixels), text=text)
    return (text or "(an empty text)") if describes else printed(sample)


def sample_as_html(
    sample: Any, sample_id: Any, study: Study | None, describe: Callable[[Any], str] | None = None
) -> str:
    """Return a sample as HTML for a notebook: a picture, a text, or the sample's values.

    Without a study, the text comes from ``describe`` if it is given.
    """
    if study is not None:
        draws = study.has("draw") or _pixels(sample) is not None
        shown = show_sample(study, sample_id, sample, SHORTENED, draws)
    elif describe is not None:
        shown = readable(describe(sample), SHORTENED)
    else:
        pixels = _pixels(sample)
        shown = printed(sample) if pixels is None else _picture_of(pixels)
    if isinstance(shown, str):
        return html.escape(shown)
    text = html.escape(shown.text)
    return f'<img src="{shown.src}" alt="" style="height: {_NOTEBOOK_PIXELS}px"> {text}'


def table_as_html(table: pd.DataFrame) -> str:
    """Return a table as HTML without its index. Texts are aligned left, and numbers right."""
    left = table.select_dtypes(exclude="number").columns
    columns = {name: [f"{_LEFT}{cell}" for cell in table[name]] for name in left}
    cells = table.assign(**columns).to_html(index=False, justify="left")
    return cells.replace(f"<td>{_LEFT}", '<td style="text-align: left">')


def short_text(study: Study, sample_id: Any, sample: Any) -> str:
    """Return one line for a sample: the shortened text from ``describe``, or else its values."""
    text = study.describe(sample_id, sample) if study.has("describe") else printed(sample)
    return " ".join(readable(text, SHORTENED).split())


def shown_tokens(study: Study, sample_id: Any, sample: Any, n_tokens: int) -> list[str]:
    """Return a text for each token of a sample.

    The study's ``token_texts`` returns the texts. If the study does not define it, the texts are
    the token ids in the sample's ``input_ids``, or 1, 2, ... if the sample has no such entry.
    """
    if study.has("token_texts"):
        return study.token_texts(sample_id, sample, n_tokens)
    numbers: Sequence[int] = range(1, n_tokens + 1)
    if isinstance(sample, Mapping) and "input_ids" in sample:
        ids = torch.as_tensor(sample["input_ids"]).flatten().tolist()
        numbers = ids[:n_tokens] if len(ids) >= n_tokens else numbers
    return [f"{number} " for number in numbers]


def _image(sample: Any) -> torch.Tensor | None:
    """Return a sample's only input if its shape is (1 or 3, height, width), else None."""
    inputs = [value for _, value in _inputs(sample)]
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor) or inputs[0].ndim != 3:
        return None
    image = inputs[0]
    is_image = image.shape[0] in (1, 3) and image.numel() > 0
    # Integers of other types than uint8 are counts or indices, not pixels.
    return image if is_image and (image.is_floating_point() or image.dtype == torch.uint8) else None


def _pixels(sample: Any) -> Any:
    """Return a sample's image as a PIL image, or None if the sample is not an image.

    If the image's file is known, the file is shown instead of the model's input, because the
    input's colours may be normalized.
    """
    if isinstance(sample, FromRow) and sample.picture is not None:
        return sample.picture()
    from PIL import Image  # Only pages and notebooks need PIL.

    if (image := _image(sample)) is None:
        return None
    levels = _levels_of(image)
    return Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)


def _levels_of(image: torch.Tensor) -> np.ndarray:
    """Return an image's pixels as uint8, shape (height, width, channels).

    Floats should be from 0 to 1. If some are outside of this range, all are rescaled to it.
    """
    scale = 255 if image.dtype == torch.uint8 else 1
    pixels = image.detach().cpu().float().numpy() / np.float32(scale)
    finite = pixels[np.isfinite(pixels)]
    if finite.size and (finite.min() < 0 or finite.max() > 1):
        pixels = pixels.astype(np.float64)  # The range of values can overflow float32.
        low, high = float(finite.min()), float(finite.max())
        pixels = (pixels - low) / max(high - low, 1e-9)
    shades = np.clip(np.nan_to_num(pixels, nan=0, posinf=1, neginf=0), 0, 1)
    return np.moveaxis(np.rint(255 * shades).astype(np.uint8), 0, -1)


def _picture_of(picture: Any) -> Picture:
    """Return a PIL image as a picture whose longer side has about 200 pixels."""
    from PIL import Image

    size = int(_INCHES * _DPI)
    width, height = (max(1, round(size * side / max(picture.size))) for side in picture.size)
    times = size // max(picture.size)
    if times > 1:  # Enlarge by an integer, so that all pixels have the same size.
        sides = picture.width * times, picture.height * times
        picture = picture.resize(sides, Image.Resampling.NEAREST)
    elif times == 0:
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    return _encoded(picture, width, height)


def _encoded(picture: Any, width: int, height: int) -> Picture:
    """Return a PIL image as a PNG or JPEG, to be shown with half of ``width`` and ``height``."""
    kind, buffer = "png", io.BytesIO()
    picture.save(buffer, kind)
    if buffer.tell() > _PNG_BYTES:
        kind, buffer = "jpeg", io.BytesIO()
        picture.save(buffer, kind, quality=85)
    return Picture(kind, buffer.getvalue(), max(1, width // 2), max(1, height // 2))


def drawn(draw: Callable[..., Any], sample: Any) -> Picture:
    """Return the picture that the study's function ``draw(axes, sample)`` draws of a sample."""
    from matplotlib.figure import Figure  # Only pages and notebooks need matplotlib.
    from PIL import Image

    figure = Figure(figsize=(_INCHES, _INCHES), dpi=_DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    draw(axes, sample)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    buffer = io.BytesIO()
    # "tight" removes margins, and extends the picture to what is drawn outside of the axes.
    figure.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0)
    with Image.open(buffer) as picture:
        return _encoded(picture.convert("RGB"), *picture.size)


def printed(sample: Sequence[Any] | Mapping[str, Any]) -> str:
    """Return a text with the first values and the shape of each entry of a sample.

    The label of a tuple is left out. A dict is shown with its labels.
    """
    entries = sample.items() if isinstance(sample, Mapping) else _inputs(sample)
    return "; ".join((f"{name}: " if name else "") + _values(value) for name, value in entries)


def _inputs(sample: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values of a sample's entries, without the label."""
    if isinstance(sample, Mapping):
        return [(name, value) for name, value in sample.items() if name != "labels"]
    return [("", value) for value in (sample[:-1] if len(sample) > 1 else sample)]


def contents_digest(sample: Any) -> bytes:
    """Return a hash of a sample's inputs without the label, to find samples with equal inputs."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _inputs(sample):
        array = np.ascontiguousarray(_array(value))
        about = f"{name}\0{array.dtype}\0{array.shape}\0"
        is_plain = array.dtype.kind != "O"
        digest.update(about.encode() + (array.tobytes() if is_plain else repr(value).encode()))
    return digest.digest()


def _values(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= _CHARACTERS else value[:_CHARACTERS] + " ..."
    array = _array(value)
    flat = array.reshape(-1)
    first = flat[:_N_VALUES].tolist()
    numbers = ", ".join(f"{n:.3g}" if isinstance(n, float) else str(n) for n in first)
    if array.ndim == 0:
        return numbers
    more = ", ..." if len(flat) > _N_VALUES else ""
    size = " x ".join(map(str, array.shape))
    return f"[{numbers}{more}] ({size})" if more or array.ndim > 1 else f"[{numbers}]"


def _array(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):  # NumPy has no bfloat16.
        value = value.detach().cpu()
        value = value.float() if value.dtype is torch.bfloat16 else value
    return np.asarray(value)


def readable(text: str, characters: int) -> str:
    """Return a text without unprintable characters, shortened to ``characters`` characters.

    Line breaks are kept. In a long text, " ... " replaces the middle. A third of the characters are
    from the end of the text, because an answer follows its prompt.
    """
    if len(text) > 40 * characters:  # Only characters near the ends are processed.
        text = text[: 20 * characters] + text[-20 * characters :]
    lines = ["".join(map(_printable, line.expandtabs(4))).rstrip() for line in text.splitlines()]
    whole = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    if len(whole) <= characters:
        return whole
    n_last = characters // 3
    return f"{whole[: characters - n_last].rstrip()} ... {whole[-n_last:].lstrip()}"


def in_a_line(text: str) -> str:
    """Return a text in one line, with spaces for line breaks, and without control characters."""
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or character in _JOINERS:
        return character
    if character.isspace():
        return " "
    # Control characters are removed, because some would change the direction of the text. Other
    # unprintable characters are replaced, for example lone surrogates, which UTF-8 cannot encode.
    is_control = unicodedata.category(character) in ("Cc", "Cf")
    return "" if is_control else "\N{REPLACEMENT CHARACTER}"
