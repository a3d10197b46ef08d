"""Shares of tokens against models that have a copy of each layer for each token."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from projections import spec_for
from torch import nn

from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.token_scores import Directions, Pairs, Shares
from trak_core.gradients import (
    gradient_method,
    gradients_at_once,
    gradients_in_turn,
    select_parameters,
)
from trak_core.gradients.gradient_consumers import Formed
from trak_core.gradients.gradient_terms import Dense
from trak_core.gradients.model_inputs import as_batch
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING as OUTPUT
from trak_core.projection import Contractions
from trak_core.projection.reference import projection_matrix

small = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
N_TEXTS, N_TOKENS, N_WORDS = 3, 7, 11


def gpt2():
    return small.gpt2(n_embd=8, n_positions=N_TOKENS, vocab_size=N_WORDS)


def llama():
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    return small.llama(hidden_size=8, intermediate_size=12, vocab_size=N_WORDS, **heads)


class PerToken(nn.Module):
    """A layer with a copy for each token."""

    def __init__(self, layer):
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(layer) for _ in range(N_TOKENS))

    def forward(self, x):
        parts = [layer(x[:, t : t + 1]) for t, layer in enumerate(self.copies)]
        return torch.cat(parts, dim=1)


def per_token(model):
    """The same model with a copy of each layer with parameters for each token."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if next(module.parameters(recurse=False), None) is not None:
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, PerToken(module))
    return twin


def oracle(model, text, parameters):
    """Gradients of f by each token's copies, float64, (tokens, entries of all parameters)."""
    twin = per_token(model).double().eval()
    outputs = OUTPUT.read(twin(input_ids=text[None], labels=text[None]))
    value = OUTPUT.value(outputs[0], text)
    copies = dict(twin.named_parameters(remove_duplicate=False))
    all_gradients = torch.autograd.grad(value, [*copies.values()], allow_unused=True)
    gradients = dict(zip(copies, all_gradients, strict=True))
    all_names = dict(model.named_parameters(remove_duplicate=False))
    rows = []
    for t in range(N_TOKENS):
        parts = []
        for parameter in parameters.values():
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for name, other in all_names.items():
                if other is parameter:
                    layer, _, last = name.rpartition(".")
                    gradient = gradients[f"{layer}.copies.{t}.{last}"]
                    total += 0 if gradient is None else gradient
            parts.append(total.flatten())
        rows.append(torch.cat(parts))
    return torch.stack(rows).numpy()


@pytest.mark.parametrize(
    ("kind", "scaled", "proj_dim"),
    [
        ("rademacher", True, 32),
        ("hadamard", True, 32),
        ("tensor_sketch", True, 32),
        ("tensor_sketch", False, 32),
        ("tensor_sketch", False, 33),
    ],
)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_shares_are_those_of_copies(make, kind, scaled, proj_dim, monkeypatch):
    """A tensor sketch uses factors of entries without scales, even if that is not cheaper here."""
    monkeypatch.setattr(Contractions, "prefers_factors", lambda *_: True)
    if kind == "hadamard":  # directions are held for few parameters, else computed in parts
        monkeypatch.setattr("trak_core.attribution.token_scores.PIECE", 300)
    # Factors of some texts at a time, or of some tokens of a text.
    most = N_TOKENS if proj_dim == 32 else 3
    monkeypatch.setattr("trak_core.projection.tensor_sketch._PIECE", 2 * proj_dim * most)
    model = make().eval()
    for parameter in model.parameters():  # norms and biases too
        nn.init.normal_(parameter, std=0.3)
    parameters = select_parameters(model, None)
    spec = spec_for(parameters, proj_dim, kind)
    vectors = torch.randn(4, proj_dim)
    # The second text is in no pair, the first in three.
    pair_list = [(0, 0), (0, 3), (0, 1), (2, 1)]
    pairs = Pairs(*torch.tensor(pair_list).T)
    texts = torch.randint(N_WORDS, (N_TEXTS, N_TOKENS))
    batch = {"input_ids": texts, "labels": texts}
    scales = {name: torch.rand(p.shape) for name, p in parameters.items() if "norm" not in name}
    scales = scales if scaled else {}
    directions = Directions(parameters, spec, vectors, scales)
    shares = Shares(parameters, directions, pairs, N_TOKENS)
    method = gradient_method(model, parameters, OUTPUT, batch)
    method(model, parameters, OUTPUT, batch, shares)
    directions = vectors.double().numpy() @ projection_matrix(spec).T
    factors = [scales.get(name, torch.ones(p.shape)).flatten() for name, p in parameters.items()]
    directions *= torch.cat(factors).double().numpy()
    names = list(parameters)
    sizes = [p.numel() for p in parameters.values()]
    ends = np.cumsum(sizes)
    for row, (text, vector) in enumerate(pair_list):
        products = oracle(model, texts[text], parameters) * directions[vector]
        by_parameter = np.add.reduceat(products.sum(0), ends - sizes)
        size = np.abs(products.sum(1)).max()
        assert np.abs(shares.by_parameter[row].numpy() - by_parameter).max() < 1e-5 * size
        # The part of a table of positions is that of no token.
        elsewhere = np.array([name.endswith("wpe.weight") for name in names]).repeat(sizes)
        by_token = np.append(products[:, ~elsewhere].sum(1), products[:, elsewhere].sum())
        assert np.abs(shares.by_token[row].numpy() - by_token).max() < 1e-5 * size
        total = float(shares.by_token[row].sum())
        assert abs(total - float(shares.by_parameter[row].sum())) < 1e-12 * size


class WithBias(nn.Module):
    """A Llama whose head has a bias, and a scale of its logits' input without dimensions."""

    def __init__(self):
        super().__init__()
        self.base, self.head = llama(), nn.Linear(8, N_WORDS)
        self.scale = nn.Parameter(torch.tensor(1.5))
        # One group of all that a text's mean has.
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids, labels=None):
        x = self.base.model(input_ids).last_hidden_state * self.scale
        return {"logits": self.head(x + self.norm(x.mean(1))[:, None])}


@pytest.mark.parametrize("kind", ["rademacher", "tensor_sketch"])
@pytest.mark.parametrize("make", [llama, WithBias])
def test_deferred_logits_have_the_same_shares(make, kind, monkeypatch):
    model = make().eval()
    parameters = select_parameters(model, None)
    spec = spec_for(parameters, 32, kind)
    monkeypatch.setattr(Contractions, "prefers_factors", lambda *_: True)
    texts = torch.randint(N_WORDS, (N_TEXTS, N_TOKENS))
    batch = as_batch({"input_ids": texts, "labels": texts}, OUTPUT)
    pairs = Pairs(torch.tensor([0, 1, 2]), torch.tensor([1, 0, 1]))
    vectors = torch.randn(2, 32)
    # Some tokens at a time.
    most = 3 * N_TEXTS * N_WORDS
    monkeypatch.setattr("trak_core.gradients.gradient_terms.max_piece_entries", lambda _: most)
    in_pieces = MarginsOfTokens(model, OUTPUT)
    results = []
    for given, of, rows in (
        (model, OUTPUT, batch),
        (in_pieces, in_pieces.output, replace(batch, gives_labels=True)),
    ):
        directions = Directions(parameters, spec, vectors)
        shares = Shares(parameters, directions, pairs, N_TOKENS)
        gradient_method(given, parameters, of, rows)(given, parameters, of, rows, shares)
        sums = shares.by_token.sum(1), shares.by_parameter.sum(1)
        torch.testing.assert_close(*sums, rtol=1e-12, atol=1e-12)
        results.append(shares)
    for name in ("by_token", "by_parameter"):
        whole, cut = (getattr(shares, name) for shares in results)
        assert (whole - cut).abs().max() < 1e-5 * whole.abs().max()
    assert results[1].by_token[:, :-2].abs().min() > 0


class Routed(nn.Module):
    """Sends all tokens of one text to an expert, and fewer of the others."""

    def __init__(self):
        super().__init__()
        self.tokens, self.expert = nn.Embedding(N_WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, N_WORDS)

    def forward(self, input_ids, labels=None):
        x = self.tokens(input_ids)
        where = (input_ids > 0).flatten().nonzero().flatten()
        rows = self.expert(x.flatten(0, 1)[where])
        x = x.flatten(0, 1).index_add(0, where, rows).view(x.shape)
        return {"logits": self.head(x)}


def test_ranks_of_routed_tokens_are_not_tokens():
    """The first text's tokens are ranked by their places, the second's are not."""
    model = Routed().eval()
    parameters = {n: p for n, p in select_parameters(model, None).items() if "expert" in n}
    texts = torch.randint(1, N_WORDS, (2, N_TOKENS))
    texts[1, :3] = 0
    pairs = Pairs(torch.tensor([0, 1]), torch.tensor([0, 0]))
    directions = Directions(parameters, spec_for(parameters, 32, "rademacher"), torch.randn(1, 32))
    shares = Shares(parameters, directions, pairs, N_TOKENS)
    batch = as_batch({"input_ids": texts, "labels": texts}, OUTPUT)
    gradients_at_once(model, parameters, OUTPUT, batch, shares)
    assert shares.by_token[:, :-1].abs().max() == 0
    torch.testing.assert_close(
        shares.by_token[:, -1], shares.by_parameter.sum(1), rtol=1e-12, atol=0
    )


def test_a_sample_without_pairs_has_no_shares():
    model = llama().eval()
    parameters = select_parameters(model, None)
    none = torch.tensor([], dtype=torch.long)
    directions = Directions(parameters, spec_for(parameters, 32, "rademacher"), torch.randn(1, 32))
    shares = Shares(parameters, directions, Pairs(none, none), N_TOKENS)
    texts = torch.randint(N_WORDS, (2, N_TOKENS))
    batch = as_batch({"input_ids": texts, "labels": texts}, OUTPUT)
    gradients_in_turn(model, parameters, OUTPUT, batch, shares)
    assert shares.by_token.shape == (0, N_TOKENS + 1)


def test_held_directions_are_no_more_than_a_piece(monkeypatch):
    """Layers of one size are held as far as they fit."""
    monkeypatch.setattr("trak_core.attribution.token_scores.PIECE", 100)
    parameters = dict(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).named_parameters())
    directions = Directions(parameters, spec_for(parameters, 32, "rademacher"), torch.randn(2, 32))
    for parameter in parameters.values():
        directions.rows_of(parameter, slice(None))
    # Five biases of four entries, and one matrix of sixteen, for two vectors.
    assert sum(tensor.numel() for tensor in directions._held.values()) == 2 * (5 * 4 + 16)


@pytest.mark.parametrize("reads", [False, True])
def test_terms_are_kept_for_consumers_that_read_them(reads):
    seen = []

    class Seen(Formed):
        reads_terms = reads

        def take(self, parameter, uses):
            seen.extend(use.terms for use in uses if isinstance(use, Dense))

    model = WithBias().eval()
    parameters = select_parameters(model, None)
    texts = torch.randint(N_WORDS, (2, N_TOKENS))
    batch = as_batch({"input_ids": texts, "labels": texts}, OUTPUT)
    gradients_at_once(model, parameters, OUTPUT, batch, Seen.zeros(parameters, 2))
    assert seen
    assert any(terms is not None for terms in seen) == reads
