"""Log-odds from logits in pieces of tokens, against autograd of all logits."""

from dataclasses import replace

import pytest
import torch
from gramians import assert_equal, gramian_of
from projections import spec_for
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.project_gradients import Features
from trak_core.gradients import (
    as_batch,
    choose_method,
    formed_gradients,
    gradient_terms,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING, MASKED_LANGUAGE_MODELLING
from trak_core.projection import project

VOCABULARY, TOKENS = 37, 11


class Model(nn.Module):
    """A causal model; ``end`` is applied to the logits."""

    def __init__(self, end=lambda model, x: x, *, is_tied=False, bias=True, is_frozen=False):
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, VOCABULARY, bias=bias)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.end, self.is_tied = end, is_tied
        self.head.requires_grad_(not is_frozen)

    def forward(self, input_ids):
        x = torch.tanh(self.mix(self.tokens(input_ids).cumsum(1)))
        logits = linear(x, self.tokens.weight) if self.is_tied else self.head(x)
        return {"logits": self.end(self, logits)}


IN_PIECES = {
    "a bias": Model,
    "no bias": lambda: Model(bias=False),
    "tied": lambda: Model(is_tied=True),
    "a frozen head": lambda: Model(is_frozen=True),
    "capped": lambda: Model(lambda model, x: torch.tanh(x / 0.7) * 0.7),
    "rows of scaled logits": lambda: Model(lambda model, x: (2 * x)[:, 0:][:, :].contiguous()),
}


def then(write):
    """A model that writes into its logits."""

    def end(model, x):
        write(x)
        return x

    return lambda: Model(end)


AS_A_WHOLE = {
    "a scale that is trained": lambda: Model(lambda model, x: x * model.scale),
    "normalized": lambda: Model(lambda model, x: x.log_softmax(-1)),
    "some of the vocabulary": lambda: Model(lambda model, x: x[:, :, : VOCABULARY - 1]),
    "copied": lambda: Model(lambda model, x: torch.zeros_like(x).copy_(x)),
    "changed in place": then(lambda x: x.add_(torch.arange(VOCABULARY))),
    "masked in place": then(lambda x: x.__setitem__((slice(None), slice(None), [3, 5]), -4.0)),
    "changed by a view": then(lambda x: x.view(-1, VOCABULARY)[:, 2:9].mul_(3)),
    "an in-place argument": then(lambda x: torch.nn.functional.relu(x, inplace=True)),
    "an output argument": then(lambda x: torch.mul(x.detach(), 2, out=x.data)),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces have three tokens of a text, or some rows of the weight for whole gradients."""
    monkeypatch.setattr(gradient_terms, "PIECE", 3 * VOCABULARY)


def prepared(make, output=LANGUAGE_MODELLING, n=3):
    model = make()
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY - 1, (n, TOKENS), generator=drawn)
    labels = tokens.clone()
    labels[0, 8:] = -100
    labels[-1, :4] = -100
    batch = as_batch({"input_ids": tokens, "labels": labels}, output)
    pieces = MarginsOfTokens(model, output)
    parameters = select_parameters(model, None)
    whole = model, parameters, output, batch
    return whole, (pieces, parameters, pieces.output, replace(batch, gives_labels=True))


def features_of(given, kind):
    spec = spec_for(given[1], 16, kind)
    features = Features(given[1], spec, len(given[3]), threads=1)
    gradients_at_once(*given, features)
    return features.scaled(), spec


def close(values, expected):
    torch.testing.assert_close(values, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("output", [LANGUAGE_MODELLING, MASKED_LANGUAGE_MODELLING])
@pytest.mark.parametrize("make", IN_PIECES.values(), ids=IN_PIECES)
def test_gradients_equal_autograd_of_all_logits(make, output):
    whole, pieces = prepared(make, output)
    expected = formed_gradients(gradients_one_by_one, *whole)
    for method in (gradients_at_once, gradients_in_turn, gradients_one_by_one):
        assert_equal(formed_gradients(method, *pieces), expected)
    assert pieces[0].is_deferred
    assert choose_method(*pieces) == (gradients_at_once, None)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("make", AS_A_WHOLE.values(), ids=AS_A_WHOLE)
def test_other_functions_of_logits_get_them_whole(make):
    whole, pieces = prepared(make)
    values = formed_gradients(gradients_one_by_one, *pieces)
    assert_equal(values, formed_gradients(gradients_one_by_one, *whole))
    assert not pieces[0].is_deferred
    assert "together" in pieces[0].notice(TOKENS)


@pytest.mark.parametrize("make", IN_PIECES.values(), ids=IN_PIECES)
def test_consumers_take_the_last_layer_without_its_gradient(make, monkeypatch):
    monkeypatch.setattr(
        "trak_core.attribution.project_gradients.prefers_factors", lambda *sizes: True
    )
    whole, pieces = prepared(make)
    gradients = formed_gradients(gradients_one_by_one, *whole)
    rows = torch.cat(gradients.blocks(), dim=1)
    features, spec = features_of(pieces, "tensor_sketch")
    close(features, project(rows, spec, scale=True))
    close(gramian_of(*pieces).float(), rows @ rows.T)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    n_entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(tensor, torch.Tensor):
                self.n_entries = max(self.n_entries, tensor.numel())
        return returned


@pytest.mark.parametrize("make", IN_PIECES.values(), ids=IN_PIECES)
def test_the_logits_of_a_text_are_never_in_memory_together(make):
    whole, pieces = prepared(make, n=1)
    values = []
    for given in (whole, pieces):
        with Largest() as largest:
            features_of(given, "rademacher")
        values.append(largest.n_entries)
    assert values[0] >= VOCABULARY * (TOKENS - 1) > values[1]
