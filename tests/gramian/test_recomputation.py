"""Blocks that run again on the way back give what blocks give that keep their activations."""

import copy
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import refused
from torch import nn

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.gradients import (
    as_batch,
    choose_method,
    formed_gradients,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    in_evaluation_mode,
    sample_memory,
    select_parameters,
)
from trak_core.gradients.recomputation import Recomputation
from trak_core.gramian import train_gramian
from trak_core.model_outputs.classification import CLASSIFICATION
from trak_core.spec import FeaturesSpec
from trak_core.stages.compute_features import compute_features

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
    """What it returns goes on as a sum that is made in place; what it was given is not saved."""

    def forward(self, x, scale=None):
        return self.back(torch.tanh(self.wide(x + 1)))


class Counts(Block):
    calls = 0

    def forward(self, x, scale=None):
        self.calls += 1
        return super().forward(x * self.calls, scale)


class Grows(Block):
    """It keeps what it saw, as a cache of keys does."""

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
            x = x.add_(changed) if self.adds else changed
        return self.head(x.mean(1))


def prepared(*args, n=3, **kwargs):
    torch.manual_seed(0)
    model = Model(*args, **kwargs)
    samples = torch.randn(n, PLACES, WIDTH), torch.arange(n) % 3
    parameters = select_parameters(model, None)
    return model, parameters, CLASSIFICATION, as_batch(samples, CLASSIFICATION)


def assert_equal(found, expected):
    for a, b in zip(found.columns(), expected.columns(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("block", [Block, WritesIntoItsInput])
def test_gradients_are_the_same(block):
    """In every way, in training mode with dropout too, which gradients leave out."""
    given = prepared(block)
    expected = formed_gradients(gradients_one_by_one, *given)
    with in_evaluation_mode(given[0]):
        gramian = train_gramian(*given[:3], [given[3]])
    blocks = Recomputation(given[0])
    assert blocks.found == list(given[0].blocks)
    blocks.start()
    for method in (gradients_one_by_one, gradients_at_once, gradients_in_turn):
        assert_equal(formed_gradients(method, *given), expected)
    assert choose_method(*given) == (gradients_at_once, None)
    with in_evaluation_mode(given[0]):
        np.testing.assert_allclose(train_gramian(*given[:3], [given[3]]), gramian, rtol=1e-12)
    twin = copy.deepcopy(given[0])
    with torch.no_grad():
        twin.blocks[0].wide.weight.zero_()
        twin.blocks[0].wide.bias.zero_()
    own = twin, select_parameters(twin, None), *given[2:]
    changed = formed_gradients(gradients_at_once, *own)
    assert not changed.gradients["blocks.0.back.weight"].any()
    assert_equal(formed_gradients(gradients_at_once, *given), expected)
    blocks.stop()
    assert all("forward" not in vars(block) for block in given[0].blocks)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"block": Counts}, "other numbers"),
        ({"block": Grows}, "saved other tensors"),
        ({"block": IsWrittenInto, "adds": True}, "written into afterwards"),
    ],
)
def test_a_block_that_cannot_run_twice_is_refused(model, words):
    given = prepared(**model)
    Recomputation(given[0]).start()
    with refused("gradients.second_call", model["block"].__name__, words):
        formed_gradients(gradients_at_once, *given)


def peak_bytes(method, given):
    """The most bytes that torch's allocator had given out and not got back, from the start on."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        formed_gradients(method, *given)
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize("method", [gradients_at_once, gradients_one_by_one])
def test_memory_does_not_grow_with_the_blocks_activations(method):
    model, parameters, output, _ = prepared(n_blocks=24)
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
from test_recomputation import Block
make_model = lambda: torch.nn.Sequential(
    *(Block(64) for _ in range(24)), torch.nn.Flatten(), torch.nn.Linear(256 * 64, 3)
)
def train_data():
    drawn = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(
        torch.randn(5, 256, 64, generator=drawn), torch.arange(5) % 3
    )
target_data = train_data
"""


def test_a_sample_that_needs_too_much_memory_is_taken_and_the_log_says_how(tmp_path, capfd):
    (tmp_path / "study.py").write_text(
        STUDY.format(paths=[str(HERE), str(HERE.parent / "support")])
    )
    torch.manual_seed(0)
    layers = *(Block(64) for _ in range(24)), nn.Flatten(), nn.Linear(256 * 64, 3)
    torch.save(nn.Sequential(*layers).state_dict(), tmp_path / "c0.pt")
    found = []
    for memory_mb in (1000, 24):
        path = tmp_path / f"{memory_mb}.h5"
        spec = FeaturesSpec(
            model_output="image_classification",
            parameter_patterns=None,
            projection={"kind": "rademacher", "proj_dim": 32, "seed": 0},
            checkpoint="c0",
            split="train",
            dtype="float32",
            study_digest="digest",
            targets_digest=None,
        )
        compute_features(
            features=path,
            checkpoint=tmp_path / "c0.pt",
            study_file=tmp_path / "study.py",
            spec=spec,
            code="code",
            device="cpu",
            batch_size=64,
            memory_mb=memory_mb,
            threads=1,
        )
        said = capfd.readouterr().out
        assert ("24 Block" in said and "run again" in said) == (memory_mb == 24)
        with open_artifact(path, FEATURES) as file:
            found.append(file.matrix("features")[:])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-6 * abs(found[0]).max())
