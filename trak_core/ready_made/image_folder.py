"""Define the study of an image classifier. Images are in a folder for each class or in a table."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trak_core.data.row_files import (
    RowFile,
    RowSample,
    RowSamples,
    as_number,
    class_number,
    read_rows,
)
from trak_core.errors import InputError, listed
from trak_core.ready_made.ready_study import (
    ReadyStudy,
    class_numbers,
    encoder,
    field,
    function_at,
    needed,
    notice,
)
from trak_core.study.sample_columns import columns_from

_SUFFIXES = frozenset({
    *(".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
})
# The names of folders for splits of a data set, which must not be mistaken for classes.
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval"}


def image_folder(
    images: str,
    model: str,
    targets: str | None = None,
    classes: Sequence[Any] | None = None,
    transform: str | None = None,
) -> ReadyStudy:
    """Return the study of a classifier that was trained on images.

    Args:
        images: A folder or a table of the training images, which must have 8 bits per channel. A
            folder has one subfolder for each class, and the ids are the images' paths in the
            folder. A table has the columns ``path`` (relative to the table's folder), ``label`` and
            optionally ``id``.
        model: The name of a network, such as ``timm/resnet18`` or ``torchvision/resnet18``. For
            ``resnet18``, timm is tried first. Instead of a name, ``file.py:function`` can be given,
            where the function takes the number of classes and returns the module. Checkpoints
            replace the module's weights.
        targets: A folder or a table of the images to explain. The default is ``images``.
        classes: Names of the classes in the order of the model's logits. The default is the sorted
            labels, or 0, 1, ... if the labels of a table are integers.
        transform: ``file.py:function``, where the function converts a PIL image in RGB to a tensor,
            as in the evaluation of the model. By default, images keep their size, and RGB values
            are scaled to the range 0 to 1.
    """
    needed("PIL", "vision")
    from PIL import Image

    rows = _rows(Path(images))
    target_rows = _rows(Path(targets)) if targets else rows
    numbers = class_numbers(classes or _class_names(rows))
    names = list(numbers)
    classes_found = ""
    if not classes:
        _notice_other_order(names)
        counts = Counter(str(row["label"]) for row in rows)
        sizes = [f"{name!r} ({counts[name]})" for name in sorted(names, key=counts.__getitem__)]
        classes_found = (
            f"The model has {len(names)} classes, which are the labels in {images}. The classes, "
            f"with the number of images of each, are {listed(sizes)}. If the model has other "
            "classes, correct the labels, or list its classes in `classes` of study_arguments."
        )
    prepared = function_at(transform, "transform") if transform else _scaled_pixels

    def sample(row: Mapping[str, Any]) -> RowSample:
        name = str(field(row, "label"))
        if name not in numbers:
            raise InputError(
                f"A label must be one of the classes {', '.join(names)}, which "
                f"{'`classes` lists' if classes else f'come from {images}'}. Found {name} for "
                f"{row['path']}.",
                code="studies.label",
            )
        try:
            opened = Image.open(row["path"])
        except OSError as error:
            raise InputError(
                f"An image must be a file that PIL can read. PIL failed: {error}.",
                code="studies.image_file",
            ) from error
        with opened as image:
            if image.mode.startswith(("I", "F")):
                raise InputError(
                    "An image must have 8 bits per channel, because PIL clips larger values to "
                    f"255. Found the mode {image.mode} in {row['path']}. Convert the image.",
                    code="studies.image_depth",
                )
            n_frames = getattr(image, "n_frames", 1)
            if n_frames > 1:
                raise InputError(
                    "An image file must have one frame, because only the first frame is read. "
                    f"Found {n_frames} frames in {row['path']}. Save only the frame that was used "
                    "in training.",
                    code="studies.image_frames",
                )
            pixels = prepared(image.convert("RGB"))
        if not isinstance(pixels, Tensor):
            raise InputError(
                "study_arguments: transform must return a tensor. Found "
                f"{type(pixels).__name__}. torch.from_numpy converts a NumPy array to a tensor.",
                code="studies.transform",
            )
        return RowSample.of(
            row,
            (pixels, torch.tensor(numbers[name])),
            partial(_read_image, Path(row["path"]).absolute()),
        )

    def as_read(sample: tuple[Tensor, Tensor]) -> str:
        pixels, number = sample[0], int(sample[1])
        ends = f"{pixels.min():.4g} to {pixels.max():.4g}"
        known = f"with the label {names[number]!r}, class {number}"
        return f"a tensor of shape {tuple(pixels.shape)} with values from {ends}, {known}"

    used = {"path", "label"}
    return ReadyStudy(
        to_change_samples=(
            "Images must have the size and the channels that the network expects. Set `transform: "
            "file.py:function` in study_arguments, where the function converts a PIL image in RGB "
            "to a tensor, as in the model's evaluation. (image.convert('L') returns one channel.)"
        ),
        make_model=lambda: _network(model, len(names)),
        train_data=lambda: RowSamples(rows, sample),
        train_ids=rows.ids,
        target_data=lambda: RowSamples(target_rows, sample),
        target_ids=target_rows.ids,
        encode=encoder(
            sample, {"path": "new/17.png", "label": names[0]}, ("path", "label"), "label"
        ),
        describe=lambda sample: names[int(sample[1])],
        as_read=as_read,
        class_names=lambda: names,
        classes_found=classes_found,
        train_columns=lambda: columns_from(rows, used),
        target_columns=lambda: columns_from(target_rows, used),
        fields_read=used,
    )


def _network(model: str, n_classes: int) -> nn.Module:
    """Return the network that the argument ``model`` of ``image_folder`` specifies."""
    if ":" in model or model.endswith(".py"):
        return function_at(model, "model")(n_classes)
    library, _, name = model.rpartition("/")
    known: list[str] = []
    if library in {"", "timm"}:
        needed("timm", "vision")
        import timm  # pyright: ignore[reportMissingImports] -- in the extra `vision`

        if timm.is_model(name):
            return timm.create_model(name, num_classes=n_classes, pretrained=False)
        known += timm.list_models()
    if library in {"", "torchvision"}:
        needed("torchvision", "vision")
        from torchvision import models  # pyright: ignore[reportMissingImports]

        if name in models.list_models(module=models):
            return models.get_model(name, weights=None, num_classes=n_classes)
        known += models.list_models(module=models)
    examples = ["timm/resnet18", "torchvision/resnet18"]
    close = get_close_matches(name, dict.fromkeys(known), n=3) or examples
    raise InputError(
        "study_arguments: model must be the name of a network in timm or torchvision, or a "
        f"function, written as file.py:function. Found {model}. Similar names are "
        f"{', '.join(close)}.",
        code="studies.network",
    )


def _class_names(rows: RowFile) -> list[str]:
    """Return the names of all classes: "0", "1", ... if labels are integers, or else the labels."""
    labels = [row.get("label") for row in rows]
    for index, label in enumerate(labels):
        if label == "" or not isinstance(label, str | int | float):
            raise InputError(
                f"{rows.place(index)}: a label must be a text or a number. Found {label!r}.",
                code="studies.label",
            )
    if rows.numbers:  # A table can have integers as labels. Names of folders are always texts.
        numbers = [as_number(label) for label in labels]
        known = [number for number in map(class_number, labels) if number is not None]
        if len(known) == len(labels):
            return [str(number) for number in range(max(known) + 1)]
        if all(isinstance(number, float) and number.is_integer() for number in numbers):
            raise InputError(
                "study_arguments: classes must list the labels in the order of the model's logits "
                f"if labels have a decimal point. Found the label {labels[0]}, and no classes.",
                code="studies.label",
            )
    return sorted({str(label) for label in labels})


def _notice_other_order(names: list[str]) -> None:
    """Print a notice if timm's ``ImageDataset`` would sort the names of the classes differently.

    timm ignores case, and compares numbers in names by their values.
    """
    parts = {name: re.split(r"(\d+)", name.lower()) for name in names}
    timm = sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in parts[name]])
    if timm != names:
        first = next(i for i, pair in enumerate(zip(names, timm, strict=True)) if len({*pair}) > 1)
        notice(
            f"class {first} is {names[first]!r}, because names of classes are sorted as texts, as "
            f"in torchvision's ImageFolder. In timm's ImageDataset, class {first} is "
            f"{timm[first]!r}. If the model was trained with ImageDataset, set `classes` in "
            "study_arguments to the names in the order of ImageDataset."
        )


def _rows(images: Path) -> RowFile:
    """Return a row with the path, label and id of each image in a folder or a table.

    In a folder, files are images if torchvision's ``ImageFolder`` accepts their endings. Hidden
    files are skipped, unlike in ``ImageFolder``. A notice lists the hidden images, and all visible
    files that are not read.
    """
    if images.is_dir():
        inside = [path.relative_to(images) for path in sorted(images.glob("**/*"))]
        shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
        linked = [p for p in shown if (images / p).is_symlink() and (images / p).is_dir()]
        if linked:
            raise InputError(
                f"study_arguments: {images} must contain folders, not links to folders, because "
                f"changes to linked files would not be noticed. Found the link {linked[0]}. "
                "Replace it by a copy of the folder, or set `images` to the original folder.",
                code="studies.linked_images",
            )
        relative = [p for p in shown if len(p.parts) > 1 and p.suffix.lower() in _SUFFIXES]
        visible = set(shown)
        files = {p for p in inside if p in visible or p.suffix.lower() in _SUFFIXES} - {*relative}
        unread = sorted(path for path in files if (images / path).is_file())
        if unread:
            notice(
                f"{images} contains {'files that are' if unread[1:] else 'a file that is'} not "
                f"read: {listed(unread)}. Images must be in a subfolder for their class, must not "
                f"be hidden, and must have one of the endings {', '.join(sorted(_SUFFIXES))}."
            )
        if not relative:
            raise InputError(
                f"study_arguments: {images} must contain a folder of images for each class. Found "
                f"no file in a subfolder that ends in one of {', '.join(sorted(_SUFFIXES))}.",
                code="studies.no_images",
            )
        classes = {path.parts[0] for path in relative}
        if len(classes) > 1 and {name.lower() for name in classes} <= _SPLITS:
            raise InputError(
                f"study_arguments: the folders in {images} must be classes. Found "
                f"{listed(sorted(classes))}, which are names of splits. Set `images` to the folder "
                "of the training images, and `targets` to that of the images to explain.",
                code="studies.splits",
            )
        empty = {p.parts[0] for p in shown} - classes - {p.name for p in unread}
        if empty:
            notice(
                f"{images} contains folders without images, which do not become classes: "
                f"{listed(sorted(empty))}."
            )
        entries = [
            {"path": str(images / path), "label": path.parts[0], "id": path.as_posix()}
            for path in relative
        ]
        return RowFile(images, entries, ())
    rows = read_rows(images)
    entries = RowSamples(rows, lambda row: {**row, "path": str(images.parent / field(row, "path"))})
    return replace(rows, rows=[*entries])


def _read_image(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _scaled_pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255
