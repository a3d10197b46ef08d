"""Recomputed blocks give the same gradients as blocks that keep their activations."""

import copy
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gramians import assert_equal, gramian_of
from pipeline import ON_CPU, features_spec
from refused import refused
from torch import nn

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution.inner_products import _prepared
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.gradients import (
    as_batch,
    choose_method,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    in_evaluation_mode,
    recompute_activations,
    sample_memory,
    select_parameters,
)
from trak_core.gradients.recompute_activations import Recomputation
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.stages.compute_features import compute_features
from trak_core.study.study import Study

HERE = Path(__file__).parent
WIDTH, PLACES = 6, 9


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.back, self.drop = nn.Linear(3 * width, width), nn.Dropout(0.5)

    def forward(self, x, scale=None):
        change = self.drop(self.back(torch.tanh(self.wide(self.norm(x))).square()))
        return x + (change if scale is None else scale["a"] * change)


class WritesIntoItsInput(Block):
    def forward(self, x, scale=None):
        return super().forward(x.mul_(1.25), scale)


class IsWrittenInto(Block):
    """Its input is not saved, and may be written into after the call."""

    def forward(self, x, scale=None):
        return self.back(torch.tanh(self.wide(x + 1)))


class Counts(Block):
    calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        return super().forward(x * self.calls, scale)


class CountsBesideALargeNumber(Counts):
    def forward(self, x, scale=None):
        large = torch.full_like(x[..., :1], 1e6)
        return torch.cat([large, super().forward(x, scale)[..., 1:]], -1)


class Rounds(Block):
    """Every call rounds differently, as sums without a fixed order do."""

    calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        return super().forward(x * (1 + self.calls % 2 * torch.finfo(x.dtype).eps), scale)


class Drops(Block):
    """Draws random numbers in evaluation mode too."""

    def forward(self, x, scale=None):
        return nn.functional.dropout(super().forward(x, scale), 0.2)


class TakesAnObject(Block):
    def forward(self, state):
        state.x = super().forward(state.x)
        return state


class TakesADict(Block):
    def forward(self, state):
        state["x"] = super().forward(state["x"])
        return state


class GivesMore(Block):
    """Returns an unused tensor, as attention returns its weights."""

    def forward(self, x, scale=None):
        y = super().forward(x, scale)
        return y, torch.tanh(y.repeat(1, 1, 6))


class Grows(Block):
    """Keeps its inputs, as a cache of keys does."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, scale=None):
        self.seen.append(x)
        return super().forward(x + torch.cat(self.seen, dim=1).square().mean(1, True), scale)


class Model(nn.Module):
    def __init__(self, block=Block, n_blocks=5, adds=False):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(n_blocks))
        self.a, self.head, self.adds = nn.Parameter(torch.ones(1)), nn.Linear(WIDTH, 3), adds

    def forward(self, x):
        x = 1 * x
        for block in self.blocks:
            changed = block(x, scale={"a": self.a})
            changed = changed[0] if isinstance(changed, tuple) else changed
            x = x.add_(changed) if self.adds else changed
        return self.head(x.mean(1))


class Sums(Model):
    """Writes into the results of blocks."""

    def forward(self, x):
        for block in self.blocks:
            changed = block(x)
            changed += x
            x = changed
        return self.head(x.mean(1))


class HandsOn(Model):
    """Its blocks pass on an object or a dict."""

    def forward(self, x):
        is_dict = isinstance(self.blocks[0], TakesADict)
        state = {"x": 1 * x} if is_dict else SimpleNamespace(x=1 * x)
        for block in self.blocks:
            state = block(state)
        return self.head((state["x"] if is_dict else state.x).mean(1))


def prepared(*args, n=3, kind=Model, **kwargs):
    torch.manual_seed(0)
    model = kind(*args, **kwargs)
    samples = torch.randn(n, PLACES, WIDTH), torch.arange(n) % 3
    parameters = select_parameters(model, None)
    return model, parameters, CLASSIFICATION, as_batch(samples, CLASSIFICATION)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [Block, WritesIntoItsInput])
def test_gradients_are_the_same(block):
    """By all methods. Dropout is off, though the model is in training mode."""
    given = prepared(block)
    expected = formed_gradients(gradients_one_by_one, *given)
    with in_evaluation_mode(given[0]):
        gramian = gramian_of(*given)
    blocks = Recomputation(given[0])
    assert blocks.blocks == list(given[0].blocks)
    blocks.start()
    for method in (gradients_one_by_one, gradients_at_once, gradients_in_turn):
        assert_equal(formed_gradients(method, *given), expected)
    assert choose_method(*given) == (gradients_at_once, None)
    with in_evaluation_mode(given[0]):
        torch.testing.assert_close(gramian_of(*given), gramian, rtol=1e-12, atol=0)
    twin = copy.deepcopy(given[0])
    with torch.no_grad():
        twin.blocks[0].wide.weight.zero_()
        twin.blocks[0].wide.bias.zero_()
    own = twin, select_parameters(twin, None), *given[2:]
    changed = formed_gradients(gradients_at_once, *own)
    assert not changed.gradients["blocks.0.back.weight"].any()
    assert_equal(formed_gradients(gradients_at_once, *given), expected)


def test_a_block_with_an_object_keeps_all(capsys):
    given = prepared(TakesAnObject, kind=HandsOn)
    expected = formed_gradients(gradients_at_once, *given)
    blocks = Recomputation(given[0])
    blocks.start()
    sample_memory(*given, blocks)
    assert blocks.notice().endswith("They keep all activations: TakesAnObject.")
    assert_equal(formed_gradients(gradients_at_once, *given), expected)


def test_a_block_with_a_dict_is_recomputed_more_than_once():
    model, _, _, batch = prepared(TakesADict, kind=HandsOn, n_blocks=3)
    model.eval()
    gradients = []
    for is_on in (False, True):
        if is_on:
            Recomputation(model).start()
        values = model(batch.args[0])[:, 0]
        parameters = [p for p in model.parameters() if p is not model.a]
        gradients.append([torch.autograd.grad(v, parameters, retain_graph=True) for v in values])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_random_numbers_are_the_same_in_a_second_call():
    given = prepared(Drops, kind=Sums)
    found = []
    for is_on in (False, True):
        if is_on:
            Recomputation(given[0]).start()
        torch.manual_seed(5)
        found.append((formed_gradients(gradients_at_once, *given), torch.rand(3)))
    assert_equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])


def test_rounding_is_a_difference_on_the_cpu_only(monkeypatch):
    given = prepared(Rounds)
    expected = formed_gradients(gradients_at_once, *given)
    Recomputation(given[0]).start()
    with refused("gradients.second_call", "Rounds", "saved other numbers"):
        formed_gradients(gradients_at_once, *given)
    monkeypatch.setattr(recompute_activations, "_checksum", recompute_activations._sums)
    found = formed_gradients(gradients_at_once, *given)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fingerprint", ["_checksum", "_sums"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"block": Counts}, "saved other numbers"),
        ({"block": Counts, "kind": Sums}, "saved other numbers"),
        ({"block": CountsBesideALargeNumber}, "saved other numbers"),
        ({"block": Grows}, "saved other tensors"),
        ({"block": IsWrittenInto, "adds": True}, "inputs had been modified"),
    ],
)
def test_a_block_that_cannot_run_twice_is_refused(model, words, fingerprint, monkeypatch):
    monkeypatch.setattr(
        recompute_activations, "_checksum", getattr(recompute_activations, fingerprint)
    )
    given = prepared(**model)
    Recomputation(given[0]).start()
    with refused("gradients.second_call", model["block"].__name__, words):
        formed_gradients(gradients_at_once, *given)


def peak_bytes(method, given):
    """Return the peak of the memory that torch's allocator handed out."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        formed_gradients(method, *given)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize(
    ("method", "block"), [(gradients_at_once, Block), (gradients_one_by_one, GivesMore)]
)
def test_memory_does_not_grow_with_the_blocks_activations(method, block):
    model, parameters, output, _ = prepared(block, n_blocks=24)
    samples = as_batch((torch.randn(1, 1000, WIDTH), torch.tensor([1])), output)
    given = model, parameters, output, samples
    before, estimated = peak_bytes(method, given), sample_memory(*given).activation_bytes
    blocks = Recomputation(model)
    blocks.start()
    after, estimate = peak_bytes(method, given), sample_memory(*given, blocks).activation_bytes
    assert after < before / 4
    assert after < estimate < estimated / 4


STUDY = """
import sys
import torch
sys.path[:0] = {paths}
from test_recompute_activations import Block
make_model = lambda: torch.nn.Sequential(
    *(Block(64) for _ in range(24)), torch.nn.Flatten(), torch.nn.Linear(256 * 64, 3)
)
def train_data():
    drawn = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn({n}, 256, 64, generator=drawn), torch.arange({n}) % 3
    )
target_data = train_data
"""


SPEC = features_spec("image_classification", 32)


def write_study(folder, n):
    (folder / "study.py").write_text(
        STUDY.format(paths=[str(HERE), str(HERE.parent / "support")], n=n)
    )
    study = Study.load(folder / "study.py")
    torch.save(study.make_model().state_dict(), folder / "c0.pt")
    return study


def test_blocks_are_recomputed_if_stored_samples_need_the_memory(tmp_path):
    study = write_study(tmp_path, 300)
    loaded = LoadedModel.of_study(study, tmp_path / "c0.pt", SPEC, torch.device("cpu"))
    (samples,) = loaded.ordered(study.split("train", None))
    assert not loaded.blocks.is_on
    _, room = _prepared(loaded, [samples], None, 30)
    assert room.most(0) > 0
    assert loaded.blocks.is_on


def test_features_of_a_sample_that_needs_too_much_memory(tmp_path, capfd):
    write_study(tmp_path, 5)
    found = []
    for memory_mb in (1000, 24):
        path = tmp_path / f"{memory_mb}.h5"
        compute_features(
            features=path,
            checkpoint=tmp_path / "c0.pt",
            study_file=tmp_path / "study.py",
            spec=SPEC,
            **ON_CPU | {"memory_mb": memory_mb},
        )
        said = capfd.readouterr().out
        assert ("24 Block" in said) == (memory_mb == 24)
        with open_artifact(path, FEATURES) as file:
            found.append(file.matrix("features")[:])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6 * abs(found[0]).max())
