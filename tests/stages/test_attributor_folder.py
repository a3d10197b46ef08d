"""`fit` uses a folder of the same data, model and settings, and refuses any other."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from refused import refused

from trak_core import Attributor
from trak_core.model_outputs.model_output import ModelOutput


def test_a_folder_keeps_features_of_the_same_data_and_settings(linear, tmp_path):
    train, targets, attributor = linear
    folder = tmp_path / "kept"
    expected = attributor().fit(train, folder).score(targets).frame
    files = sorted(folder.rglob("*.h5"))
    before = [file.stat().st_mtime_ns for file in files]
    assert attributor().fit(train, folder).score(targets).frame.equals(expected)
    assert [file.stat().st_mtime_ns for file in files] == before
    # One checkpoint changes: its files are made again, and no others.
    state = torch.load("c1.pt")
    torch.save({name: value + 1 for name, value in state.items()}, "c1.pt")
    changed = attributor().fit(train, folder)
    assert not changed.score(targets).frame.equals(expected)
    after = [file.stat().st_mtime_ns for file in files]
    assert [a == b for a, b in zip(after, before, strict=True)] == [
        f.parent.name == "c0" or f.stem == "c0" for f in files
    ]
    # A checkpoint that changes between fit and score is refused.
    late = attributor().fit(train, folder)
    torch.save(state, "c1.pt")
    with refused("attribution.other_folder", "checkpoint"):
        late.score(targets)
    others = [attributor(seed=1), attributor(kind="normal"), attributor(parameters=["bias"])]
    others += [attributor(label_draws=2)]
    for other in others:
        with refused("attribution.other_folder"):
            other.fit(train, folder)
    with refused("attribution.other_folder", "training data"):
        attributor().fit((train[0], train[1] + 1), folder)
    # What follows from features needs no other folder.
    assert attributor(damping=9).fit(train, folder).settings.damping == 9


def test_paths_are_those_of_the_folder_in_which_fit_was_called(linear, tmp_path, monkeypatch):
    train, targets, attributor = linear
    fitted = attributor().fit(train, "kept")
    expected = fitted.score(targets).frame
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fitted.score(targets).frame.equals(expected)
    assert not any(Path().iterdir())


class Net(torch.nn.Module):
    """A network whose function depends on more than its weights."""

    def __init__(self, scale=1.0, activation=torch.relu):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)
        self.scale, self.activation = scale, activation
        self.register_buffer("shift", torch.tensor(0.0), persistent=False)

    def forward(self, x):
        return self.last(self.activation(self.scale * self.first(x) + self.shift))


CHANGES = {
    "number": lambda net: setattr(net, "scale", 1.5),
    "function": lambda net: setattr(net, "activation", lambda x: x.square()),
    "buffer": lambda net: net.shift.fill_(1.0),
    "hook": lambda net: net.first.register_forward_hook(lambda *given: given[2] * 2),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("projection", [None, "exact"])
def test_a_folder_of_another_model_is_refused(linear, tmp_path, change, projection):
    """Features of different functions must not be mixed."""
    train, targets, _ = linear
    torch.manual_seed(0)
    torch.save(Net().state_dict(), "net.pt")

    def fit(net):
        made = Attributor(net, "regression", ["net.pt"], projection=projection, proj_dim=8)
        return made.fit(train, tmp_path / "kept")

    before = fit(Net()).score(targets).frame
    pd.testing.assert_frame_equal(fit(Net()).score(targets).frame, before)
    changed = Net()
    CHANGES[change](changed)
    with refused("attribution.other_folder", "model or output function"):
        fit(changed)


@pytest.mark.parametrize(("factor", "weight"), [(3.0, 1.0), (1.0, 0.5)])
def test_a_folder_of_another_output_is_refused(linear, tmp_path, factor, weight):
    train = linear[0]

    def fit(factor, weight):
        output = ModelOutput(
            value=lambda returned, label: factor * returned[0],
            loss_weight=lambda returned, label: weight * torch.ones(()),
        )
        made = Attributor(torch.nn.Linear(3, 1), output, ["c0.pt"], proj_dim=8)
        return made.fit(train, tmp_path / "kept")

    for _ in range(2):
        fit(1.0, 1.0)
    with refused("attribution.other_folder", "model or output function"):
        fit(factor, weight)


def test_a_folder_resumes_a_model_of_transformers(tmp_path):
    lora_models = pytest.importorskip("lora_models", reason="with the extra `test`")
    texts = lora_models.texts(12)
    data = {"input_ids": texts, "labels": texts}

    def fit(model):
        made = Attributor(model, "language_modelling", model.state_dict(), proj_dim=16)
        return made.fit(data, tmp_path)

    model = lora_models.gpt2()
    fit(model)
    file = next(tmp_path.rglob("features/*/train.h5"))
    before = file.stat().st_mtime_ns
    fit(model)
    assert file.stat().st_mtime_ns == before
    model.transformer.h[0].mlp.act = torch.nn.Tanh()
    with refused("attribution.other_folder", "model or output function"):
        fit(model)


def test_data_that_changes_between_fit_and_score_is_refused(linear):
    train, targets, attributor = linear
    data = tuple(tensor.clone() for tensor in train)
    made = attributor(projection="exact", proj_dim=1024).fit(data)
    data[0].add_(1)
    with refused("attribution.changed_data"):
        made.score(targets)
