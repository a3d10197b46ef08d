"""Scores with a normal matrix of labels drawn from the model, against dense float64 matrices."""

import copy
import re
from functools import cache

import numpy as np
import pytest
import torch
from oracle import projected
from pipeline import EXACTLY, ON_CPU, features_spec, read_scores
from refused import refused
from trained_cases import assert_close

from trak_core import Attributor
from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution.device import Compute
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.label_draws import LabelDraws
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.settings import stream_of
from trak_core.stages.compute_features import compute_features
from trak_core.stages.join_shards import join_shards
from trak_core.study.study import Study

K, DRAWS = 12, 3


def limits(batch_size, memory_mb=500):
    return Compute(torch.device("cpu"), batch_size, memory_mb, threads=1)


TEXTS = """
import texts
import torch


def make_model():
    torch.manual_seed(0)
    return texts.{make}


def train_data():
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(2, 11, (3 + i % 4,), generator=generator) for i in range(10)]
    return [{{"input_ids": text, "labels": text}} for text in tokens]
"""
MAKE = {"causal": "gpt2(initializer_range=0.3)", "paired": "t5()"}


def computed(path, study_file, checkpoint, spec, **settings):
    compute_features(
        features=path, checkpoint=checkpoint, study_file=study_file, spec=spec, **ON_CPU | settings
    )
    with open_artifact(path, FEATURES) as file:
        return file.matrix("sampled_normal")[:], file.matrix("features")[:]


def dense_rows(model, logits_of, samples):
    """Gradients by plain autograd in float64, with labels that NumPy draws from the same numbers.

    The shape is (n, draws, p). ``logits_of`` returns a sample's logits, (parts, classes), and the
    numbers of its label's parts. A single class is the output of a regression.
    """
    model = copy.deepcopy(model).double().eval()
    parameters, rows = list(model.parameters()), []
    for i, sample in samples:
        logits, uniform = logits_of(model, sample, i)
        for draw in range(DRAWS):
            p, u = logits.detach().softmax(-1).numpy(), uniform[..., draw].reshape(-1)
            z = np.stack([
                np.eye(len(q))[np.searchsorted(np.cumsum(q), v, side="right")] - q
                for q, v in zip(p, u, strict=True)
            ])
            if p.shape[-1] == 1:
                z = np.where(u[:, None] < 0.5, -1.0, 1.0)
            f = (logits * torch.from_numpy(z)).sum()
            gradients = torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True)
            flat = [
                torch.zeros(p.numel(), dtype=p.dtype) if g is None else g.flatten()
                for p, g in zip(parameters, gradients, strict=True)
            ]
            rows.append(torch.cat(flat).numpy())
    return np.reshape(rows, (len(samples), DRAWS, -1))


def dense_normal(rows, k=K, checkpoint="c0"):
    """The normal matrix of gradients (n, draws, p), projected to k dimensions unless k is None."""
    phi = rows.reshape(-1, rows.shape[2])
    phi = phi if k is None else projected(phi, k, checkpoint=checkpoint)
    return phi.T @ phi / DRAWS


@cache
def rows_of_case(case, checkpoint="c0"):
    draws = LabelDraws(DRAWS, stream_of(checkpoint))

    def logits_of(model, sample, i):
        *inputs, _ = sample
        uniform = draws._uniform(case.train.ids[i], ())
        return model(*(x.double().unsqueeze(0) for x in inputs)), uniform

    samples = [(i, case.train.samples[i]) for i in range(len(case.train.ids))]
    return dense_rows(case.models[checkpoint], logits_of, samples)


def test_the_matrix_is_that_of_plain_autograd(case, tmp_path):
    """Also in other batches and in shards. Features are those without draws.

    For regression the matrix is that without draws too.
    """
    spec, expected = (
        features_spec(case.output, K, label_draws=DRAWS),
        dense_normal(rows_of_case(case)),
    )
    given = case.path, case.checkpoints["c0"], spec
    normal, features = computed(tmp_path / "all.h5", *given)
    assert_close(normal, expected, 1e-4)
    assert (normal == normal.T).all()
    assert_close(computed(tmp_path / "few.h5", *given, batch_size=7)[0], normal, 1e-5)
    parts = [tmp_path / f"{i}.h5" for i in (1, 2, 3)]
    for i, part in enumerate(parts, start=1):
        computed(part, *given, shard=i, n_shards=3)
    join_shards(features=tmp_path / "joined.h5", shards=parts, spec=spec, code="code")
    with open_artifact(tmp_path / "joined.h5", FEATURES) as file:
        assert_close(file.matrix("sampled_normal")[:], normal, 1e-5)
    (j, *_), _ = case.jacobians["c0"]
    assert_close(features, projected(j, K), 1e-4)
    if case.output == "regression":
        assert_close(normal, features.T @ features, 1e-4)


def test_inner_products_are_those_of_plain_autograd(case, capsys):
    """Also in blocks of rows and in other batches."""
    spec = features_spec(case.output, label_draws=DRAWS, **EXACTLY)
    study, path = Study.load(case.path), case.checkpoints["c0"]
    loaded = LoadedModel.of_study(study, path, spec, torch.device("cpu"))
    (j, *_), (j_t, *_) = case.jacobians["c0"]
    dense = np.concatenate([j, *rows_of_case(case).swapaxes(0, 1)])
    given = loaded, case.train
    for targets, expected in ((None, dense @ dense.T), (case.target_split, dense @ j_t.T)):
        products, _ = inner_products(*given, targets, spec, limits(64))
        assert_close(products, expected, 1e-5)
        assert "gradients of 7 " in capsys.readouterr().out or targets is None
        n_mb = 8 * expected.size // 2**20
        blocks, columns = inner_products(*given, targets, spec, limits(7, n_mb + 2))
        assert_close(blocks, products, 1e-6)
        if targets is None:
            (block,) = re.findall(r"gradients of (\d+) train", capsys.readouterr().out)
            assert int(block) < len(j)
            assert (blocks == blocks.T).all()
            assert_close(columns[1].numpy(), case.jacobians["c0"][0][1], 1e-5)


@pytest.mark.parametrize("k", [K, None])
@pytest.mark.parametrize("combine", ["product_of_averages", "unit_average"])
def test_scores_are_those_of_the_formula(case, tmp_path, combine, k):
    damping, power = 0.3, 0.75
    results = tmp_path / "results"
    settings = {"combine": combine, "damping": damping, "power": power, "label_draws": DRAWS}
    scores = read_scores(case.stages(results, 2, proj_dim=k, **settings))
    similarities, weights = [], []
    for checkpoint in ("c0", "c1"):
        normal = dense_normal(rows_of_case(case, checkpoint), k, checkpoint)
        (phi, f, y), (targets, *_) = case.jacobians[checkpoint]
        if k is not None:
            phi, targets = (projected(j, k, checkpoint=checkpoint) for j in (phi, targets))
        damped = normal + damping * np.trace(normal) / len(phi) * np.eye(len(normal))
        q = 1 / (1 + np.exp(f)) if case.output == "image_classification" else y - f
        weights.append(np.sign(q) * np.abs(q) ** power)
        a = phi @ np.linalg.solve(damped, targets.T)
        own = np.abs(weights[-1])[:, None] * (phi @ np.linalg.solve(damped, phi.T))
        similarities.append(a / np.linalg.norm(own) if combine == "unit_average" else a)
    a, q = np.array(similarities), np.array(weights)[:, :, None]
    expected = (a * q).mean(0) if combine == "unit_average" else a.mean(0) * q.mean(0)
    assert_close(scores.to_numpy(), expected, 1e-3)


@pytest.mark.parametrize("kind", ["causal", "paired"])
def test_texts_of_different_lengths(tmp_path, kind):
    """Also if the model itself gets the labels, which are then those of the study."""
    pytest.importorskip("transformers")
    path = tmp_path / "short_texts.py"
    path.write_text(TEXTS.format(make=MAKE[kind]))
    study, output = Study.load(path), "language_modelling"
    output = output if kind == "causal" else "sequence_to_sequence"
    model = study.make_model()
    torch.save(model.state_dict(), tmp_path / "c0.pt")
    spec = features_spec(output, K, label_draws=DRAWS)
    loaded = LoadedModel.of_study(study, tmp_path / "c0.pt", spec, torch.device("cpu"))
    draws = LabelDraws(DRAWS, stream_of("c0"))
    train = study.split("train", None)

    def logits_of(model, text, i):
        uniform = draws._uniform(train.ids[i], text["labels"].shape)
        if kind == "causal":
            return model(text["input_ids"][None]).logits[0, :-1], uniform[1:]
        return model(**{key: value[None] for key, value in text.items()}).logits[0], uniform

    rows = dense_rows(model, logits_of, list(enumerate(train.samples)))
    expected = dense_normal(rows)
    given = path, tmp_path / "c0.pt", spec
    for batch_size in (1, 4):
        file = tmp_path / f"{batch_size}.h5"
        assert_close(computed(file, *given, batch_size=batch_size)[0], expected, 1e-4)
        exact = features_spec(output, label_draws=DRAWS, **EXACTLY)
        products, _ = inner_products(loaded, train, None, exact, limits(batch_size))
        drawn = np.concatenate(rows.swapaxes(0, 1))
        assert_close(products[10:, 10:], drawn @ drawn.T, 1e-4)


def test_outputs_without_noise_are_refused():
    with refused("config.label_draws", "loss", "text_classification"):
        Attributor(torch.nn.Linear(2, 1), "loss", label_draws=1)
    with refused("config.label_draws", "Found -1"):
        Attributor(torch.nn.Linear(2, 1), "regression", label_draws=-1)
    with refused("config.label_draws", "scoring.normalize"):
        Attributor(torch.nn.Linear(2, 1), "regression", label_draws=1, normalize=True)
    several = ModelOutput(
        read=lambda returned: (returned,),
        value=lambda read, label: read[0].sum(),
        loss_noise=lambda read, label, uniform: read,
    )
    data = torch.randn(4, 2), torch.zeros(4)
    for made in (several, ModelOutput(value=lambda read, label: read.sum())):
        for sizes in ({"proj_dim": 4}, {"projection": "exact"}):
            with refused("model.no_loss_noise"):
                Attributor(torch.nn.Linear(2, 1), made, label_draws=1, **sizes).fit(data)
    # A number would be multiplied with each of the returned numbers.
    made = ModelOutput(value=lambda read, label: read.sum(), loss_noise=lambda read, *_: read.sum())
    with refused("model.no_loss_noise", "(3,)", "()"):
        Attributor(torch.nn.Linear(2, 3), made, label_draws=1, proj_dim=4).fit(data)
