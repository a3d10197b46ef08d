"""Samples with wrong labels: of the type of the right ones, whatever that is."""

import numpy as np
import pytest
import torch
from refused import refused

from trak_core.study.dataset_split import Split, with_flipped_labels
from trak_core.study.retraining_draws import flipped_labels

LABELS = np.arange(20) % 3


@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, np.array, torch.tensor, lambda x: np.array(x, np.int16)]
)
@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: {"x": x, "labels": y}])
def test_a_wrong_label_is_of_the_type_of_the_right_one(kind, make):
    samples = [make(torch.ones(2) * i, kind(y)) for i, y in enumerate(LABELS)]
    flipped = with_flipped_labels(Split(samples, list(range(20))), 0.3, 1).samples
    for before, after, label in zip(samples, flipped, flipped_labels(LABELS, 0.3, 1), strict=True):
        a, b = (x["labels"] if isinstance(x, dict) else x[-1] for x in (before, after))
        assert b == label
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        assert np.shape(a) == np.shape(b) == ()


@pytest.mark.parametrize(("label", "found"), [(0.5, "()"), ([1, 2], "(2,)")])
def test_labels_that_are_no_classes_are_refused(label, found):
    samples = [(torch.ones(2), torch.tensor(label))] * 2
    with refused("study.flipped_labels", f"shape {found} of {samples[0][1].dtype} in sample a"):
        with_flipped_labels(Split(samples, ["a", "b"]), 0.5, 0)


def test_labels_that_are_all_the_same_are_refused():
    with refused("study.flipped_classes", 4):
        with_flipped_labels(Split([(torch.ones(1), 4)] * 3, [0, 1, 2]), 0.5, 0)
