"""Weights of a large checkpoint aren't drawn first, where nothing that is left could tell."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trak_core.study import unset_weights
from trak_core.study.checkpoints import load_checkpoint


class Net(nn.Module):
    """Has weights that several of torch's initializations draw, and buffers that none does."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 7, bias=False)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4))
        self.head.weight = self.embedding.weight
        nn.init.xavier_normal_(self.layers[0].weight)
        nn.init.orthogonal_(self.layers[2].weight_hh_l0)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4), persistent=False)
        self.places = torch.arange(4)


def with_part(make):
    def build():
        model = Net()
        model.part = make(model)
        return model

    return build


class Drawn(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("drawn", torch.empty(3).normal_(), persistent=persistent)


class Weights(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights


def half_a_storage(model):
    whole = torch.empty(6).normal_()
    model.whole = whole
    return Weights(nn.Parameter(whole[:3]))


def while_caught(model):
    try:
        return Weights(nn.Parameter(torch.randn(3)))
    except BaseException:
        return nn.Linear(3, 3)


# Whether weights are left as they are.
BUILT = {
    "layers": (Net, True),
    "copies of layers": (
        with_part(lambda m: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2)),
        True,
    ),
    "in bfloat16": (lambda: Net().to(torch.bfloat16), True),
    "a buffer that is saved": (with_part(lambda m: Drawn(True)), True),
    "numbers that go": (with_part(lambda m: nn.Linear(3, int(torch.empty(2, 2).numel()))), True),
    "a buffer that isn't": (with_part(lambda m: Drawn(False)), False),
    "a copy of it": (with_part(lambda m: copy.deepcopy(Drawn(False))), False),
    "an attribute made of weights": (with_part(lambda m: Weights(m.head.weight * 2)), False),
    "written into another": (
        with_part(lambda m: Weights(torch.zeros(7, 4).copy_(m.head.weight.detach()))),
        False,
    ),
    "draws that are looked at": (
        with_part(lambda m: Weights(nn.init.trunc_normal_(nn.Parameter(torch.empty(3))))),
        False,
    ),
    "other draws": (with_part(lambda m: Weights(torch.randn(3))), False),
    "a draw of its own generator": (
        with_part(lambda m: Weights(torch.empty(3).normal_(generator=torch.Generator()))),
        False,
    ),
    "read as a number": (with_part(lambda m: Weights(m.head.weight[1, 1].item())), False),
    "read as NumPy": (with_part(lambda m: Weights(m.head.weight.detach().numpy().copy())), False),
    "compared": (
        with_part(lambda m: Weights(torch.equal(m.head.weight, m.embedding.weight + 1))),
        False,
    ),
    "a part of its storage": (with_part(half_a_storage), False),
    "caught": (with_part(while_caught), False),
}


class Made:
    """A study that makes one model."""

    def __init__(self, make):
        self.make, self.calls = make, 0

    def make_model(self):
        self.calls += 1
        return self.make()


def numbers(value):
    """All that a model holds, modules and attributes, as plain values."""
    if isinstance(value, nn.Module):
        value = vars(value)
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(v) for v in value]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().float().tolist()
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, bool | int | float | str) else type(value)


@pytest.mark.parametrize("name", BUILT)
def test_a_model_is_the_same_whether_its_weights_were_drawn_first(name, tmp_path, monkeypatch):
    make, is_undrawn = BUILT[name]
    path = tmp_path / "weights.safetensors"
    torch.manual_seed(5)
    first = make().state_dict()
    save_file({k: v.clone() + 1 for k, v in first.items() if k != "head.weight"}, path)
    found = []
    for least in (2**28, 0):
        monkeypatch.setattr(unset_weights, "_LARGE_BYTES", least)
        torch.manual_seed(3)
        before = torch.get_rng_state()
        study = Made(make)
        model = unset_weights.model_to_load(study, path)
        drew = not torch.equal(before, torch.get_rng_state())
        assert drew == (least > 0 or not is_undrawn)
        assert study.calls == (2 if drew and not least else 1)
        load_checkpoint(model, path)
        found.append(numbers(model))
    assert found[0] == found[1]
