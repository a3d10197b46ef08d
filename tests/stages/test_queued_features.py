"""Features are copied from a simulated GPU while the next batch is computed."""

import pytest
import torch
from pipeline import ON_CPU, features_spec

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution import project_gradients
from trak_core.stages.compute_features import compute_features


class Copies:
    """Copies whose numbers arrive when their event is awaited."""

    def __init__(self, log):
        self.log, self.n_batches = log, 0

    def __call__(self, tensors):
        copies = [torch.full_like(tensor, -7) for tensor in tensors]
        event, self.n_batches = Event(self, self.n_batches, tensors, copies), self.n_batches + 1
        self.log.append(("queued", event.number))
        return copies, event


class Event:
    def __init__(self, copies, number, *pair):
        self.all, self.number, self.pair = copies, number, pair

    def synchronize(self):
        for tensor, copy in zip(*self.pair, strict=True):
            copy.copy_(tensor)
        self.all.log.append(("awaited", self.number))


@pytest.fixture
def features(digits, tmp_path):
    """Compute features of seven targets, two at a time; return the arrays of the file."""
    targets = digits.targets
    spec = features_spec(digits.output, 16, split="mine", targets=targets)
    given = {"checkpoint": digits.checkpoints["c0"], "study_file": digits.path, "spec": spec}
    given |= ON_CPU | {"targets": targets, "batch_size": 2}

    def computed(name):
        compute_features(features=tmp_path / name, **given)
        with open_artifact(tmp_path / name, FEATURES) as file:
            names = "labels", "outputs", "predictions"
            return [file.matrix("features")[:], *map(file.vector, names)]

    return computed


def test_a_batch_is_awaited_after_the_next_is_queued(features, monkeypatch):
    expected, log = features("cpu"), []
    monkeypatch.setattr(project_gradients, "_copied", Copies(log))
    for own, other in zip(features("gpu"), expected, strict=True):
        assert (own == other).all()
    assert log[:4] == [("queued", 0), ("queued", 1), ("awaited", 0), ("queued", 2)]
    assert [number for what, number in log if what == "awaited"] == [*range(4)]
    assert log[-2:] == [("awaited", 2), ("awaited", 3)]
