"""Plans of earlier batches are reused if a graph's signature determines them, and never stale."""

import gc
import re
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from architectures import Net
from torch import nn

from trak_core.gradients import (
    formed_gradients,
    gradients_at_once,
    one_pass,
    sample_owner_rules,
    select_parameters,
)
from trak_core.gradients.graph import SETTINGS
from trak_core.model_outputs.model_output import over_samples
from trak_core.model_outputs.supervised import CLASSIFICATION


def layers(call):
    """A network that calls a function of its layers and of a batch (n, 4, 4)."""
    linear = partial(nn.Linear, 4, 4)
    parts = {"first": linear, "second": linear, "head": lambda: nn.Linear(4, 3)}
    return Net(lambda m, x: m.head(call(m, x)), parts)


def branches(m, x):
    """The operations depend on the batch."""
    x = m.first(x).tanh() if x.sum() > 0 else m.second(m.first(x).tanh()).relu()
    return x.mean(1)


def turns(m, x):
    """The dimensions depend on the batch; operations and, for four samples, shapes don't."""
    dims = (0, 1) if x.sum() > 0 else (1, 2)
    turned = m.first(x).tanh().transpose(*dims).contiguous()
    return m.second(turned).tanh().transpose(*dims).mean(1)


def shares(m, x):
    """The batch decides whether one layer is used twice."""
    first = m.first(x).tanh()
    return (m.first if x.sum() > 0 else m.second)(first).mean(1)


def experts(m, x):
    """Each token goes to one of two experts."""
    flat = x.flatten(0, 1)
    mixed = torch.zeros_like(flat)
    for expert, own in ((m.first, flat[:, 0] > 0), (m.second, flat[:, 0] <= 0)):
        (places,) = own.nonzero(as_tuple=True)
        mixed = mixed.index_add(0, places, expert(flat[places]).tanh())
    return mixed.view(x.shape).mean(1)


def shuffled(m, x):
    """Samples are reordered by the data, and restored."""
    order = x.sum((1, 2)).argsort()
    return m.second(m.first(x)[order].tanh())[order.argsort()].mean(1)


class Moved(torch.autograd.Function):
    """An operation without a rule, which reorders the tokens of all samples."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.places = places
        return x.flatten(0, 1)[places].view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.flatten(0, 1)[ctx.places.argsort()].view_as(gradient), None


def probed(m, x):
    """The operation is probed, because the data determine the order."""
    places = x.flatten(0, 1)[:, 0].argsort()
    moved = Moved.apply(m.first(x), places)
    return Moved.apply(m.second(moved.tanh()), places.argsort()).mean(1)


FIXED, BY_VALUE = (branches, turns, shares), (experts, shuffled, probed)


def samples_of(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, 4, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator)


def gradients_of(model, samples):
    parameters = select_parameters(model, None)
    return formed_gradients(gradients_at_once, model, parameters, CLASSIFICATION, samples).gradients


def by_autograd(model, samples):
    """One backward pass for each sample, after one forward pass of the batch."""
    parameters = select_parameters(model, None)
    values = over_samples(CLASSIFICATION.value, model(samples[0]), samples[1])
    given = {"retain_graph": True, "materialize_grads": True}
    rows = [torch.autograd.grad(f, list(parameters.values()), **given) for f in values]
    return dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True))


def assert_fresh(model, batches):
    """Gradients equal those without earlier plans, bit for bit, and those of autograd."""
    for samples in batches:
        gradients = gradients_of(model, samples)
        kept = dict(one_pass._PLANS)
        one_pass._PLANS.clear()
        fresh = gradients_of(model, samples)
        one_pass._PLANS.update(kept)
        torch.testing.assert_close(gradients, fresh, rtol=0, atol=0)
        plain = by_autograd(model, samples)
        torch.testing.assert_close(gradients, plain, rtol=1e-4, atol=1e-6)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Start without plans, and return a list that gets an entry for each new one."""
    plans = []
    make = one_pass.make_plan
    monkeypatch.setattr(one_pass, "make_plan", lambda *given: plans.append(1) or make(*given))
    monkeypatch.setattr(one_pass, "_PLANS", {})
    return plans


@pytest.mark.parametrize("call", [*FIXED, *BY_VALUE], ids=lambda call: call.__name__)
def test_kept_plans_give_what_new_ones_do(call, made):
    """A plan is made once, unless values determine it."""
    model = layers(call)
    for seed in range(12):
        gradients_of(model, samples_of(4, seed))
    assert len(made) == len(one_pass._PLANS) == 2 if call in FIXED else len(made) == 12
    sizes = [3, 1, 4, 3, 2, 4, 4, 1, 3, 2, 4, 4]
    assert_fresh(model, [samples_of(n, seed) for seed, n in enumerate(sizes)])


def test_other_parameters_of_the_same_shapes_have_plans_of_their_own():
    model, samples = layers(shares), samples_of(3, 0)
    for frozen in (model.first.weight, model.second.weight, model.second.bias):
        frozen.requires_grad_(False)
        assert_fresh(model, [samples, samples])
        frozen.requires_grad_(True)


def test_plans_keep_no_tensor_and_no_graph_and_few_are_kept():
    model = layers(turns)
    for n in range(2, 30):
        gradients_of(model, samples_of(n, n))
    assert len(one_pass._PLANS) == one_pass._MOST_PLANS
    weight = weakref.ref(model.head.weight)
    del model
    gc.collect()
    assert weight() is None


def test_signatures_have_all_settings_that_rules_read():
    """Except indices, because plans that depend on them aren't kept."""
    source = Path(sample_owner_rules.__file__)
    text = source.read_text() + source.with_name("backward_plan.py").read_text()
    read = set(re.findall(r'node\._saved_(\w+)|"_saved_(\w+)"', text))
    assert {name for pair in read for name in pair if name} - {"index", "indices"} == set(SETTINGS)
