"""TRAK's interface with whole models, user-defined tasks, and CLIP's model output."""

import itertools

import numpy as np
import pytest
import torch
from architectures import Net
from compat_models import images, tracer, walk
from refused import refused
from torch import nn

from trak_core.compat.gradient_computers import (
    FunctionalGradientComputer,
    IterativeGradientComputer,
)
from trak_core.compat.modelout_functions import (
    AbstractModelOutput,
    CLIPModelOutput,
    ImageClassificationModelOutput,
)
from trak_core.compat.projectors import vectorize
from trak_core.errors import InputError

models = pytest.importorskip("models", reason="the extra `test` brings transformers")


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image, text):
        u = nn.functional.normalize(self.image(image), dim=-1)
        v = nn.functional.normalize(self.text(text), dim=-1)
        return u, v, self.logit_scale.exp()


def test_clip_draws_with_a_fixed_seed_and_weights_each_pair(tmp_path):
    torch.manual_seed(0)
    model, pairs = Pairs(), (torch.randn(50, 6), torch.randn(50, 5))
    given = {"model": model, "task": "clip", "train_set_size": 50, "proj_dim": 8}
    traker = tracer(tmp_path / "a", **given)
    loader = [tuple(t[i : i + 20] for t in pairs) for i in (0, 20, 40)]
    traker.task.get_embeddings(model, loader, batch_size=20, embedding_dim=4, size=45)
    assert CLIPModelOutput.num_computed_embeddings == 45
    traker.load_checkpoint(model.state_dict(), 0)
    traker.featurize(pairs, num_samples=50)
    weights = traker.saver.current_store["out_to_loss"]
    assert weights.shape == (50, 1)
    assert (weights > 0).all()
    first = np.array(traker.saver.current_store["grads"])
    again = tracer(tmp_path / "b", **given)
    again.load_checkpoint(model.state_dict(), 0)
    torch.manual_seed(99)
    again.featurize(pairs, num_samples=50)
    assert np.array_equal(again.saver.current_store["grads"], first)


def test_clip_needs_embeddings(tmp_path, monkeypatch):
    for name in ("image_embeddings", "text_embeddings", "_picked"):
        monkeypatch.setattr(CLIPModelOutput, name, None)
    model = Pairs()
    traker = tracer(tmp_path, model=model, task="clip", train_set_size=4, proj_dim=2)
    traker.load_checkpoint(model.state_dict(), 0)
    with refused("compat.no_embeddings"):
        traker.featurize((torch.randn(4, 6), torch.randn(4, 5)), num_samples=4)


class NextToken(AbstractModelOutput):
    """A user-defined model output, as the documentation of the original suggests."""

    def __init__(self):
        pass

    def get_output(self, model, weights, buffers, tokens):
        named = {"input_ids": tokens.unsqueeze(0)}
        logits = torch.func.functional_call(model, (weights, buffers), args=(), kwargs=named).logits
        return -nn.functional.cross_entropy(logits[0, :-1], tokens[1:])

    def get_out_to_loss_grad(self, model, weights, buffers, batch):
        return torch.ones(len(batch[0]), 1)


def test_gpt2_with_a_user_defined_model_output(tmp_path):
    model = models.gpt2()
    model.config.pad_token_id = None  # the check for padding has no vmap rule
    data = [models.texts(n, seed=n)[:1] for n in (20, 3)]
    given = {"task": NextToken(), "save_dir": tmp_path, "proj_dim": 8}
    traker, scores = walk(model, [model.state_dict()], *data, **given)
    assert np.isfinite(scores).all()
    # The tied output layer is counted once.
    assert traker.num_params == sum(p.numel() for p in model.parameters())


def test_a_model_that_mixes_samples_is_refused(tmp_path):
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), norm)
    traker = tracer(tmp_path, model=model, train_set_size=20)
    traker.load_checkpoint(model.state_dict(), 0)
    with pytest.raises(InputError, match=r"must not depend on other samples .* 2 "):
        traker.featurize(images(20), num_samples=20)


class _Subclass(ImageClassificationModelOutput):
    """A user-defined task with the same f."""


def test_a_user_defined_task_with_the_same_output_has_the_same_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    batch = torch.randn(7, 1, 6, 6), torch.arange(7) % 5
    task = ImageClassificationModelOutput()
    one_by_one = IterativeGradientComputer(model, task, device="cpu")
    expected = one_by_one.compute_per_sample_grad(batch)
    # A first batch of one sample must not decide the method for batches of seven.
    for first, kind in itertools.product((7, 1), (task, _Subclass())):
        computer = FunctionalGradientComputer(model, kind, device="cpu")
        computer.compute_per_sample_grad([t[:first] for t in batch])
        gradients = computer.compute_per_sample_grad(batch)
        flat = vectorize(gradients, device="cpu")
        torch.testing.assert_close(flat, expected, rtol=1e-5, atol=1e-6)


WRITING = "writes into its input"
CALLS = {
    WRITING: lambda linear, x: linear(x.mul_(2)),
    "branches by its values": lambda linear, x: linear(x) ** 2 if x.sum() > 0 else -linear(x),
    "takes a number out": lambda linear, x: linear(x) * (1 + abs(x.sum().item())),
    "draws random numbers": lambda linear, x: linear(x) + 0 * torch.rand(4),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_model_without_vmap_is_differentiated_one_sample_at_a_time(call, capsys):
    torch.manual_seed(0)
    model = Net(lambda m, x: CALLS[call](m.linear, x), {"linear": lambda: nn.Linear(3, 4)})
    batch = torch.randn(6, 3), torch.arange(6) % 4
    functional = FunctionalGradientComputer(model, _Subclass(), device="cpu")
    one_by_one = IterativeGradientComputer(model, _Subclass(), device="cpu")
    expected = one_by_one.compute_per_sample_grad([t.clone() for t in batch])
    assert expected.shape == (6, 16)
    gradients = vectorize(functional.compute_per_sample_grad(batch), device="cpu")
    torch.testing.assert_close(gradients, expected)
    assert ("one sample at a time" in capsys.readouterr().out) == (call != WRITING)
