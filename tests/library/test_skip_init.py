"""A model that is built without drawing its weights is, once they are read, the one it was."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from trak_core.study.load_checkpoint import load_checkpoint, model_to_load
from trak_core.study.skip_init import built_without_draws


class Layers(nn.Module):
    """Every way to draw weights, and a buffer that follows from sizes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
        )
        self.linear = parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.token = nn.Parameter(torch.randn(1, 4))
        self.place = nn.Parameter(torch.rand(3).to(torch.bfloat16))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.trunc_normal_(self.linear.bias, std=0.02)
        nn.init.orthogonal_(self.recurrent.weight_hh_l0)
        self.spectral.bias.data.normal_()
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4), persistent=False)
        own = torch.Generator().manual_seed(3)
        self.register_buffer("drawn", torch.randn(3, generator=own).mul_(2), persistent=False)


def everything(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def same(model, other):
    own, others = everything(model), everything(other)
    assert own.keys() == others.keys()
    assert all(torch.equal(own[key], others[key]) for key in own)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in other.parameters()
    ]


def built_and_loaded(make, folder):
    """The model, and what making it as it stands gives, under one checkpoint."""
    torch.manual_seed(5)
    saved = make()
    with torch.no_grad():
        for value in saved.state_dict().values():
            value.add_(1)
    torch.save(saved.state_dict(), folder / "a.pt")
    built = built_without_draws(make)
    assert built is not None
    drawn = make()
    for model in (built, drawn):
        load_checkpoint(model, folder / "a.pt")
    return built, drawn


def test_numbers_are_those_of_a_model_that_was_drawn(tmp_path):
    built, drawn = built_and_loaded(Layers, tmp_path)
    same(built, drawn)
    assert built.head.weight is built.embedding.weight


def test_nothing_is_drawn(monkeypatch):
    make = lambda: nn.Sequential(nn.Linear(500, 500), nn.Embedding(500, 500))  # ruff: ignore[lambda-assignment]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert built_without_draws(make) is not None
    assert torch.equal(torch.get_rng_state(), before)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)


def branch(weight):
    return bool((weight > 0).all())


def swallowed(weight):
    try:
        return weight.std().item()
    except Exception:
        return 1.0


def copied(weight):
    first = torch.zeros(3, 3)
    return first.copy_(weight)


def part(_weight):
    return torch.empty(4, 3).normal_()[3:]


# Values that a model keeps outside of its state dict, and that depend on drawn numbers.
KEPT = {
    "random features": lambda _: torch.randn(3),
    "a permutation": lambda _: torch.randperm(3),
    "a tensor": lambda weight: weight.std(),
    "a number": lambda weight: float(weight.std()),
    "an array": lambda weight: np.sign(weight.numpy()),
    "a list": lambda weight: weight.tolist(),
    "a copy": lambda weight: copy.deepcopy(weight),
    **{"a branch": branch, "an error": swallowed, "a copy in place": copied, "a part": part},
}


@pytest.mark.parametrize("kind", KEPT)
def test_values_that_depend_on_drawn_numbers_are_those_of_the_seed(kind, tmp_path):
    def make():
        model = Base()
        model.kept = KEPT[kind](model.linear.weight.detach())
        return model

    torch.save(make().state_dict(), tmp_path / "a.pt")
    torch.manual_seed(7)
    expected = make()
    torch.manual_seed(7)
    assert built_without_draws(make) is None
    model = model_to_load(make, tmp_path / "a.pt")
    assert np.array_equal(np.asarray(model.kept), np.asarray(expected.kept))
    same(model, expected)


class Forked(Base):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.second = nn.Linear(3, 3)
            self.register_buffer("noise", torch.randn(3), persistent=False)


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        nn.init.normal_(self.linear.weight, generator=generator)
        self.register_buffer("noise", torch.randn(3, generator=generator), persistent=False)


class Kept(Base):
    """Parameters that are held or changed by another name than that of their module."""

    def __init__(self):
        super().__init__()
        weight = nn.Parameter(torch.randn(3, 3))
        self.weight = weight
        self.all, self.view = [weight], weight.data.view(9)
        weight.requires_grad_(False)
        self.device = next(self.parameters()).device


@pytest.mark.parametrize("make", [Forked, OwnGenerator, Kept])
def test_a_model_is_the_one_that_was_drawn_whatever_else_it_holds(make, tmp_path):
    torch.save({k: v + 1 for k, v in make().state_dict().items()}, tmp_path / "a.pt")
    model, expected = model_to_load(make, tmp_path / "a.pt"), make()
    for each in (model, expected):
        load_checkpoint(each, tmp_path / "a.pt")
    same(model, expected)
    if make is Kept:
        assert model.all[0] is model.weight
        assert torch.equal(model.view, model.weight.flatten())
        assert model.device == expected.device


class OwnWay(Base):
    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict({"linear.bias": state["linear.bias"]}, strict=False)


@pytest.mark.parametrize(("make", "file"), [(OwnWay, "a.pt"), (Base, "adapter")])
def test_a_model_that_a_checkpoint_does_not_fill_is_drawn(make, file, tmp_path):
    """A model with its own way of loading, and an adapter, do not replace all initial weights."""
    torch.save(Base().state_dict(), tmp_path / "a.pt")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    torch.manual_seed(2)
    expected = make()
    torch.manual_seed(2)
    same(model_to_load(make, tmp_path / file), expected)


@pytest.mark.parametrize("make", ["gpt2", "llama", "bert", "t5", "bart"])
def test_models_of_transformers(make, tmp_path):
    texts = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
    same(*built_and_loaded(getattr(texts, make), tmp_path))
