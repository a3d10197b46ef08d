"""Samples are shown as pictures that a study draws, as images, or as printed numbers."""

import base64
import io

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.pyplot import imread

from trak_core.report.describe_samples import find_examples
from trak_core.report.read_results import File
from trak_core.study.dataset_split import Split
from trak_core.study.show_samples import are_drawn, printed
from trak_core.study.study import Study


def decoded(picture):
    head, _, data = picture.src.partition(";base64,")
    kind = head.removeprefix("data:image/")
    pixels = imread(io.BytesIO(base64.b64decode(data)), format=kind)
    return kind, np.repeat(pixels[..., None], 3, axis=2) if pixels.ndim == 2 else pixels


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ((torch.tensor([1.5, 2.0]), torch.tensor(3)), "[1.5, 2]"),
        ((torch.arange(20), torch.tensor(3)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...] (20)"),
        ((torch.zeros(1, 2), [1, 2], 0), "[0, 0] (1 x 2); [1, 2]"),
        ({"input_ids": torch.tensor([101, 7]), "labels": 1}, "input_ids: [101, 7]; labels: 1"),
        ((2.25,), "2.25"),
    ],
)
def test_samples_that_are_not_drawn_are_printed(sample, text):
    assert printed(sample) == text


def shown_without_draw(folder, samples):
    """Return whether samples of a study without `draw` are drawn, and how they are shown."""
    path = folder / "study.py"
    path.write_text("")
    study, split = Study.load(path), Split(samples, list(range(len(samples))))
    top = pd.DataFrame({"train_id": split.ids})
    file = File("", "", {}, {}, {"shown": top.head(0), "top_influences": top}, {})
    (examples,) = find_examples(study, [file], split, [split])
    assert examples.drawn is are_drawn(study, split)
    return examples.drawn, list(examples.train.values())


def test_images_are_drawn_without_draw(tmp_path):
    shades = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    color = torch.stack([shades, shades.T, 1 - shades])
    broken = torch.tensor([[-2.0, 2.0], [torch.nan, torch.inf]])
    samples = [
        (shades[None], 1),
        {"pixel_values": color, "labels": 1},
        ((255 * shades[None]).round().byte(), 1),
        (4 * shades[None] - 2, 1),
        (broken[None], 1),
        ((6e38 * shades.double() - 3e38).float()[None], 1),
    ]
    is_drawn, pictures = shown_without_draw(tmp_path, samples)
    assert is_drawn
    grey = shades[..., None].expand(2, 2, 3)
    clean = torch.tensor([[0.0, 1.0], [0.0, 1.0]])[..., None].expand(2, 2, 3)
    expected = [grey, color.movedim(0, -1), grey, grey, clean, grey]
    for picture, image in zip(pictures, expected, strict=True):
        _, pixels = decoded(picture)
        height, width = pixels.shape[:2]
        middles = pixels[height // 4 :: height // 2, width // 4 :: width // 2, :3][:2, :2]
        assert np.abs(middles - image.numpy()).max() < 0.01


@pytest.mark.parametrize(
    "sample",
    [
        (torch.zeros(4, 4), 1),
        (torch.zeros(2, 4, 4), 1),
        (torch.zeros(1, 3, 4, 4), 1),
        (torch.zeros(3, 4, 4, dtype=torch.int64), 1),
        (torch.zeros(3, 0, 4), 1),
        (torch.zeros(3, 4, 4), torch.zeros(3, 4, 4), 1),
    ],
)
def test_other_tensors_are_printed(sample, tmp_path):
    assert shown_without_draw(tmp_path, [sample]) == (False, [printed(sample)])
