"""Layers for which settings of torch, memory formats or cached tensors change or hide gradients."""

from functools import partial

import pytest
import torch
from architectures import Net
from gramians import gramian_of
from torch import nn
from torch.nn.functional import embedding, embedding_bag
from torch.utils.checkpoint import checkpoint

from trak_core.compat.gradient_computers import FunctionalGradientComputer
from trak_core.compat.modelout_functions import ImageClassificationModelOutput
from trak_core.gradients import (
    as_batch,
    check_samples_apart,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    gradients_in_turn,
    gradients_one_by_one,
    in_evaluation_mode,
    select_parameters,
)
from trak_core.gradients.batch_size import sample_memory
from trak_core.model_outputs.supervised import CLASSIFICATION

METHODS = [gradients_at_once, gradients_in_turn, gradients_one_by_one]


def averaged(m, tokens):
    return m.head(m.table(tokens).mean(1).tanh())


def bagged(m, tokens):
    return m.head(m.table(tokens).tanh())


def checkpointed(m, tokens, *, is_reentrant):
    return m.head(checkpoint(m.body, m.table(tokens).mean(1), use_reentrant=is_reentrant))


def looked_up(m, tokens):
    found = embedding(tokens, m.weights, sparse=True, scale_grad_by_freq=True)
    bags = embedding_bag(tokens, m.weights, mode="sum", sparse=True)
    return m.head((found.mean(1) + bags).tanh())


def spectral(m, tokens):
    """Multiplies complex numbers by a real parameter."""
    spectrum = torch.fft.rfft(m.table(tokens).mean(1))
    return m.head(torch.fft.irfft(spectrum * m.filter, n=4))


def as_tokens(m, image):
    """Normalizes an image and reads it as tokens: its gradient has the channels last."""
    return m.head(m.norm(m.conv(image)).flatten(2).transpose(1, 2).mean(1).tanh())


def of_tokens(m, image):
    """Normalizes tokens as an image one pixel wide: the image has the channels last."""
    tokens = m.conv(image).flatten(2).transpose(1, 2).contiguous()
    return m.head(m.norm(tokens.transpose(1, 2).unsqueeze(-1)).mean((2, 3)).tanh())


def recomputed(m, image):
    """Recomputes the normalization in the backward pass."""
    image = checkpoint(m.norm, m.conv(image), use_reentrant=False)
    return m.head(image.flatten(2).transpose(1, 2).mean(1).tanh())


def of_tables(forward, **parts):
    """Samples repeat tokens, for which ``scale_grad_by_freq`` matters."""
    return forward, parts, torch.tensor([[0, 1, 1, 1], [2, 2, 3, 1], [4, 0, 2, 0]])


def of_norms(forward, norm, conv=nn.Conv2d):
    parts = {"conv": lambda: conv(1, 4, 1), "norm": lambda: norm(4)}
    sizes, drawn = (3, 2, 2) if conv is nn.Conv3d else (3, 2), torch.Generator().manual_seed(0)
    return forward, parts, torch.randn(3, 1, *sizes, generator=drawn, dtype=torch.float64)


TABLE = partial(nn.Embedding, 5, 4)
BODY = {"body": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())}
MODELS = {
    "sparse table": of_tables(averaged, table=partial(TABLE, sparse=True)),
    "sparse functions": of_tables(looked_up, weights=lambda: nn.Parameter(torch.randn(5, 4))),
    "by frequency": of_tables(averaged, table=partial(TABLE, scale_grad_by_freq=True)),
    "bag by frequency": of_tables(
        bagged, table=lambda: nn.EmbeddingBag(5, 4, scale_grad_by_freq=True)
    ),
    "checkpoint": of_tables(partial(checkpointed, is_reentrant=False), table=TABLE, **BODY),
    "reentrant": of_tables(partial(checkpointed, is_reentrant=True), table=TABLE, **BODY),
    "spectrum": of_tables(spectral, table=TABLE, filter=lambda: nn.Parameter(torch.randn(3))),
    "compiled": of_tables(averaged, table=TABLE),
    "BatchNorm2d": of_norms(as_tokens, nn.BatchNorm2d),
    "BatchNorm3d": of_norms(as_tokens, nn.BatchNorm3d, nn.Conv3d),
    "InstanceNorm2d": of_norms(as_tokens, partial(nn.InstanceNorm2d, affine=True)),
    "one pixel wide": of_norms(of_tokens, nn.BatchNorm2d),
    "recomputed": of_norms(recomputed, nn.BatchNorm2d),
}


class OwnTask(ImageClassificationModelOutput):
    """Computed by ``torch.vmap``, because a subclass may compute anything."""


def by_differences(model, images, labels):
    """Return central differences of f. The model is never called with a single sample."""
    step, pair = 1e-6, torch.cat([images, images])

    def f():
        return CLASSIFICATION.value(model(pair), torch.cat([labels, labels]))[: len(labels)]

    gradients = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = parameter.new_zeros(len(labels), *parameter.shape)
            for i in range(parameter.numel()):
                entry = parameter.view(-1)[i]
                start = entry.clone()
                above, below = (f() for entry[...] in (start + step, start - step))
                entry.copy_(start)
                rows.view(len(labels), -1)[:, i] = (above - below) / (2 * step)
            gradients[name] = rows
    return gradients


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # without a graph
@pytest.mark.filterwarnings("ignore:Guards may run slower")  # torch.compile on Python 3.13.0
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_output_by_one_pass(name, capsys):
    """The batches have three samples and one sample."""
    forward, parts, inputs = MODELS[name]
    model = Net(forward, {**parts, "head": lambda: nn.Linear(4, 3)}).eval()
    if "norm" in parts:
        for tensor in (model.norm.weight, getattr(model.norm, "running_mean", None)):
            if tensor is not None:
                nn.init.normal_(tensor)
    model = torch.compile(model, backend="aot_eager") if name == "compiled" else model
    whole, parameters = (inputs, torch.tensor([0, 2, 1])), select_parameters(model, None)
    expected = by_differences(model, *whole)
    sample_memory(model, parameters, CLASSIFICATION, whole)
    check_samples_apart(model, CLASSIFICATION, whole)
    assert gradient_method(model, parameters, CLASSIFICATION, whole) is gradients_at_once
    assert not capsys.readouterr().out
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-8)
    for n in (3, 1):
        batch = [x[:n] for x in whole]
        given = model, parameters, CLASSIFICATION, batch
        own = {name: rows[:n] for name, rows in expected.items()}
        for method in METHODS:
            close(formed_gradients(method, *given).gradients, own)
        if "norm" in parts:
            by_vmap = FunctionalGradientComputer(model, OwnTask())
            close(by_vmap.compute_per_sample_grad(batch), own)
        flat = torch.cat([rows.flatten(1) for rows in own.values()], dim=1)
        with in_evaluation_mode(model):
            close(gramian_of(*given), flat @ flat.T)


def test_torch_is_restored():
    owners = torch, torch.utils.checkpoint
    before = [dict(vars(owner)) for owner in owners]
    with in_evaluation_mode(nn.Embedding(5, 4)):
        assert torch.embedding is not before[0]["embedding"]
    assert [vars(owner) for owner in owners] == before


def gradients_of(method, model, samples, patterns=None):
    batch, parameters = as_batch(samples, CLASSIFICATION), select_parameters(model, patterns)
    return formed_gradients(method, model, parameters, CLASSIFICATION, batch).gradients


@pytest.mark.parametrize("patterns", [None, ["2.*"], ["0.*"]])
def test_transformer_layers_by_their_plain_formula(patterns):
    """Not by their inference kernels, which leave no graph."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3))
    batch = [torch.randn(4, 3, 8), torch.tensor([0, 1, 2, 0])]
    at_once, _, one_by_one = (gradients_of(method, model, batch, patterns) for method in METHODS)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-6)
    assert torch.backends.mha.get_fastpath_enabled()


class KeepsItsBias(nn.Module):
    """Caches a bias computed from a parameter until training, as models of timm do."""

    def __init__(self, keeps):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.biases = nn.Parameter(torch.randn(6))
        self.bias_cache = {}
        # Not emptied by ``train``.
        self.bound_cache = {"most": 2.0}
        self.keeps = keeps

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self.bias_cache = {}

    def forward(self, x):
        if not self.keeps or "cpu" not in self.bias_cache:
            bias = self.biases[[0, 2, 2, 5]].exp()
            self.bias_cache["cpu"] = bias.clamp(max=self.bound_cache["most"])
        return self.head((self.inner(x) * self.bias_cache["cpu"]).tanh())


@pytest.mark.parametrize("method", METHODS)
def test_what_a_model_derived_earlier_and_kept_hides_no_gradient(method):
    model, plain = KeepsItsBias(True), KeepsItsBias(False)
    model.eval()
    plain.load_state_dict(model.state_dict())
    samples = torch.randn(3, 3), torch.tensor([0, 2, 1])
    with torch.no_grad():
        model(samples[0])  # fills the cache
    expected = gradients_of(method, plain, samples)
    assert expected["biases"].any()
    for _ in range(2):
        torch.testing.assert_close(gradients_of(method, model, samples), expected, rtol=0, atol=0)
    assert (model.bias_cache, model.bound_cache) == ({}, {"most": 2.0})
    assert not model.training
