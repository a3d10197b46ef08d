"""Samples with wrong labels: of the type of the right ones, whatever that is."""

import numpy as np
import pytest
import torch

from trak_core.errors import InputError
from trak_core.study.draws import flipped_labels
from trak_core.study.split import Split, class_labels, with_flipped_labels

LABELS = np.arange(20) % 3


@pytest.mark.parametrize(
    "kind", [int, np.int64, np.uint8, np.array, torch.tensor, lambda x: np.array(x, np.int16)]
)
@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: {"x": x, "labels": y}])
def test_a_wrong_label_is_of_the_type_of_the_right_one(kind, make):
    samples = [make(torch.ones(2) * i, kind(y)) for i, y in enumerate(LABELS)]
    found = with_flipped_labels(Split(samples, list(range(20))), 0.3, 1)
    assert class_labels(found).tolist() == flipped_labels(LABELS, 0.3, 1).tolist()
    for before, after in zip(samples, found.samples, strict=True):
        a, b = (x["labels"] if isinstance(x, dict) else x[-1] for x in (before, after))
        assert type(a) is type(b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
        assert np.shape(a) == np.shape(b) == ()


@pytest.mark.parametrize(
    ("label", "message"), [(0.5, r"must be integers"), ([1, 2], r"must be integers, one a sample")]
)
def test_labels_that_are_no_classes_are_refused(label, message):
    samples = [(torch.ones(2), torch.tensor(label)), (torch.ones(2), torch.tensor(label))]
    with pytest.raises(InputError, match=message):
        with_flipped_labels(Split(samples, ["a", "b"]), 0.5, 0)


def test_labels_that_are_all_the_same_are_refused():
    with pytest.raises(InputError, match=r"two classes or more\. Found 4 only"):
        with_flipped_labels(Split([(torch.ones(1), 4)] * 3, [0, 1, 2]), 0.5, 0)
