"""Computing a batch's features synchronizes with a GPU once, at the end.

Operations synchronize if they return a number to Python, or a tensor whose size depends on numbers.
They are counted on the CPU by torch's dispatcher, without those of the model's forward pass.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from projections import spec_for
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trak_core.attribution import project_gradients
from trak_core.attribution.deferred_logits import MarginsOfTokens
from trak_core.attribution.project_gradients import queued_features
from trak_core.gradients import as_batch, gradient_terms, select_parameters
from trak_core.gradients.gradient_methods import gradients_at_once
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.projection import tensor_sketch

WAIT = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts, self.n_operations = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.n_operations += not function.is_view
        by_mask = name in {"index", "index_put_"} and any(
            isinstance(x, torch.Tensor) and x.dtype is torch.bool for x in args[1]
        )
        if name in WAIT or by_mask:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def texts(n_layers=2):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": n_layers, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (3, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, :3] = -100  # a prompt
    samples = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return model.eval(), LANGUAGE_MODELLING, as_batch(samples, LANGUAGE_MODELLING)


def texts_in_pieces():
    """Logits are computed for few tokens at a time."""
    model, output, batch = texts()
    model = MarginsOfTokens(model, output)
    return model, model.output, replace(batch, gives_labels=True)


def images():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    samples = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 1])
    return nn.Sequential(*layers).eval(), CLASSIFICATION, as_batch(samples, CLASSIFICATION)


def project_held(features):
    """Project all formed gradients in one call."""
    held = sorted(features._held.items())
    project_gradients.add_rows(features.rows, held, features._projection)
    features._held, features._n_held = {}, 0


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Sketch all factors, and all formed gradients in one call, by torch."""
    monkeypatch.setattr(project_gradients, "prefers_factors", lambda *_: True)
    monkeypatch.setattr(tensor_sketch, "_has_kernels", lambda _: False)
    monkeypatch.setattr(project_gradients.Features, "_project_held", project_held)


@pytest.mark.parametrize("kind", ["rademacher", "hadamard", "normal", "tensor_sketch", "factors"])
@pytest.mark.parametrize("make", [texts, texts_in_pieces, images])
def test_features_wait_once(make, kind, monkeypatch, request):
    monkeypatch.setattr(gradient_terms, "max_piece_entries", lambda _: 200)
    if kind == "factors":
        request.getfixturevalue("as_on_a_gpu")
        kind = "tensor_sketch"
    model, output, batch = make()
    parameters = select_parameters(model, None)
    spec = spec_for(parameters, 64, kind)
    given = model, parameters, output, batch, spec, range(len(batch)), 1, None
    with Counted() as forward:
        batch.given_to(model)
    for _ in range(2):  # with a new plan, and with a kept one
        with Counted() as counted:
            queued_features(gradients_at_once, *given).wait()
        assert counted.counts - forward.counts == {"_local_scalar_dense": 1}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_sketches_add_few_operations_to_a_pass():
    """A GPU's host needs some 10 us for each."""
    model, output, batch = texts(n_layers=12)
    parameters = select_parameters(model, None)
    given = model, parameters, output, batch, spec_for(parameters, 64, "tensor_sketch")
    queued_features(gradients_at_once, *given, range(len(batch)), 1, None).wait()
    with Counted() as counted:
        queued_features(gradients_at_once, *given, range(len(batch)), 1, None).wait()
    with Counted() as floor:
        outputs = output.read(batch.given_to(model))
        torch.vmap(output.value)(outputs, batch.labels).sum().backward()
    assert counted.n_operations <= 1.4 * floor.n_operations
