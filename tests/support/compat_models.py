"""Small models, data and calls of TRAK's interface, for the tests of compat."""

import functools

import numpy as np
import torch
from torch import nn

import trak_core.compat as trak
from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionSpec

N, M, CLASSES = 40, 6, 4


class Net(nn.Module):
    """A small residual network with BatchNorm, built as torchvision's are."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Text(nn.Module):
    """A text classifier that takes the output of a tokenizer by name and returns logits."""

    def __init__(self):
        super().__init__()
        self.tokens, self.types = nn.Embedding(30, 8), nn.Embedding(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, input_ids, token_type_ids, attention_mask):
        x = self.tokens(input_ids) + self.types(token_type_ids)
        mask = attention_mask.unsqueeze(-1).to(x.dtype)
        # Without a padding mask in the layer: its fast path has no vmap rule.
        x = self.layer(x * mask)
        return self.head((x * mask).sum(1) / mask.sum(1))


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(n, 3, 6, 6, generator=generator)
    return pixels, torch.randint(CLASSES, (n,), generator=generator)


def texts(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(30, (n, 5), generator=generator)
    lengths = torch.randint(1, 6, (n, 1), generator=generator)
    mask = (torch.arange(5) < lengths).long()
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return ids, torch.randint(2, (n, 5), generator=generator), mask, labels


TASKS = {"image_classification": (Net, images), "text_classification": (Text, texts)}


@functools.cache
def checkpoints(make, count):
    """Return state dicts of untrained models, with BatchNorm statistics of a batch."""
    states = []
    for seed in range(count):
        torch.manual_seed(seed)
        model = make().train()
        if make is Net:
            with torch.no_grad():
                model(images(32, seed=100 + seed)[0])
        states.append(model.state_dict())
    return states


def injected(base, n_params, proj_dim, seed=0):
    """Return a projector of either package that applies our unscaled matrix."""

    class Injected(base):
        def __init__(self):
            super().__init__(n_params, proj_dim, seed, "rademacher", "cpu")

        def project(self, grads, model_id):
            if isinstance(grads, dict):
                grads = torch.cat([g.flatten(1) for g in grads.values()], dim=1)
            spec = ProjectionSpec(
                kind="rademacher", n_params=n_params, proj_dim=proj_dim, seed=seed, stream=model_id
            )
            return grads @ torch.from_numpy(projection_matrix(spec)).float()

        def free_memory(self):
            pass

    return Injected()


def close(values, expected, tolerance=1e-4):
    """Compare arrays, with differences in units of the largest entry."""
    values, expected = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    assert values.shape == expected.shape
    assert np.abs(values - expected).max() <= tolerance * np.abs(expected).max()


SETTINGS = {
    "task": "image_classification",
    "device": "cpu",
    "logging_level": 100,
    "use_half_precision": False,
}


def tracer(folder, **arguments):
    """Return our TRAKer for ``Net``, with changed arguments."""
    given = {"model": Net(), "train_set_size": N, "save_dir": folder, "proj_dim": 12, **SETTINGS}
    return trak.TRAKer(**{**given, **arguments})


def featurize(traker, model_id=0, batch=N):
    traker.load_checkpoint(checkpoints(Net, model_id + 1)[model_id], model_id)
    for start in range(0, N, batch):
        part = [t[start : start + batch] for t in images(N)]
        traker.featurize(part, num_samples=len(part[0]))


def featurized(folder, model_ids=(0,), **arguments):
    traker = tracer(folder, **arguments)
    for model_id in model_ids:
        featurize(traker, model_id)
    return traker


def finalized(folder, model_ids=(0,), **arguments):
    traker = featurized(folder, model_ids, **arguments)
    traker.finalize_features()
    return traker


def scored(traker, model_ids=(0,), name="mine"):
    for model_id in model_ids:
        state = checkpoints(Net, model_id + 1)[model_id]
        traker.start_scoring_checkpoint(name, state, model_id, num_targets=M)
        traker.score(images(M, seed=1), num_samples=M)
    return traker


def walk(model, states, train, targets, *, package=trak, batch=16, **arguments):
    """Featurize, finalize and score with every checkpoint; return the TRAKer and the scores."""
    given = {"train_set_size": len(train[0]), **SETTINGS, **arguments}
    tracer = package.TRAKer(model=model, **given)
    for model_id, state in enumerate(states):
        tracer.load_checkpoint(state, model_id=model_id)
        for start in range(0, len(train[0]), batch):
            part = [t[start : start + batch] for t in train]
            tracer.featurize(batch=part, num_samples=len(part[0]))
    tracer.finalize_features()
    for model_id, state in enumerate(states):
        m = len(targets[0])
        tracer.start_scoring_checkpoint("mine", state, model_id=model_id, num_targets=m)
        tracer.score(batch=targets, num_samples=m)
    return tracer, tracer.finalize_scores(exp_name="mine")
