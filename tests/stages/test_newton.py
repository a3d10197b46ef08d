"""Gauss-Newton scores against dense matrices in float64."""

import copy
import itertools
import re
from functools import cache

import numpy as np
import pytest
import torch
from pipeline import ON_CPU, averaged, features_spec, read_scores, scores_spec
from refused import refused
from torch import nn
from trained_cases import assert_close

from trak_core.attribution import gauss_newton_scores
from trak_core.attribution.gauss_newton_scores import newton_scores
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.config.memory_needs import check_memory
from trak_core.errors import InputError
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.stages.compute_gramian import compute_newton_scores
from trak_core.study.study import Study

PROJECTION = {"projection": {"kind": "gauss_newton"}, "dtype": "float64"}
DAMPING = 0.1


def newton(case, *, checkpoint="c0", batch_size=64, memory_mb=500, model_output=None, **settings):
    spec = features_spec(model_output or case.output)
    path = case.checkpoints.get(checkpoint, checkpoint)
    loaded = LoadedModel.of_study(Study.load(case.path), path, spec, torch.device("cpu"))
    given = case.train, case.target_split, DAMPING, batch_size, memory_mb
    return newton_scores(loaded, *given, **settings)


def dense_matrix(case, rows):
    """sum_i B_i^T H_i B_i over some training samples, scaled to all, by plain backward passes."""
    model = copy.deepcopy(case.models["c0"]).double().eval()
    total = 0.0
    for i in rows:
        *inputs, _ = case.train.samples[i]
        logits = model(*(x.double().unsqueeze(0) for x in inputs))[0]
        passes = [torch.autograd.grad(z, [*model.parameters()], retain_graph=True) for z in logits]
        b = torch.stack([torch.cat([g.flatten() for g in each]) for each in passes])
        h = torch.eye(1, dtype=torch.float64)
        if case.output == "image_classification":
            p = logits.detach().softmax(0)
            h = torch.diag(p) - torch.outer(p, p)
        total = total + b.T @ h @ b
    return (total * (len(case.train.ids) / len(rows))).numpy()


@cache
def dense(case, n_curved):
    n = len(case.train.ids)
    rows = np.random.default_rng(0).permutation(n)[:n_curved].tolist()
    return dense_matrix(case, rows)


def plain_steps(matrix, b, steps):
    """Conjugate gradients as in a textbook, in float64."""
    x, r = np.zeros_like(b), b.copy()
    p = r.copy()
    for _ in range(steps):
        alpha = (r @ r) / (p @ matrix @ p)
        x = x + alpha * p
        smaller = r - alpha * matrix @ p
        p = smaller + (smaller @ smaller) / (r @ r) * p
        r = smaller
    return x


@pytest.mark.parametrize("name", ["diabetes", "small_digits"])
def test_scores_are_those_of_the_dense_matrix(cases, name):
    """Twelve steps give those of a textbook's conjugate gradients, and many the solution."""
    case = cases[name]
    (j, *_), (j_t, *_) = case.jacobians["c0"]
    short = newton(case)
    matrix = dense(case, short.curved)
    damped = matrix + short.ridge * np.eye(len(matrix))
    twelve = np.stack([plain_steps(damped, b, 12) for b in j_t], axis=1)
    assert_close(short.values, j @ twelve, 1e-4)
    # The estimate of the trace from 16 vectors is within three standard deviations.
    trace = short.ridge * len(j) / DAMPING
    spread = np.sqrt(2 * np.square(matrix - np.diag(np.diag(matrix))).sum() / 16)
    assert abs(trace - np.trace(matrix)) < 3 * spread
    many = newton(case, steps=60)
    assert many.ridge == short.ridge
    solution = j @ np.linalg.solve(damped, j_t.T)
    assert_close(many.values, solution, 1e-4)
    assert np.abs(short.values - solution).max() > 1e-3 * np.abs(solution).max()


def test_the_matrix_is_that_of_a_part_of_the_training_samples(digits, monkeypatch):
    monkeypatch.setattr(gauss_newton_scores, "LEAST_CURVED", 20)
    some = newton(digits)
    assert some.curved == 37  # a quarter of 150
    (j, *_), (j_t, *_) = digits.jacobians["c0"]
    matrix = dense(digits, 37)
    damped = matrix + some.ridge * np.eye(len(matrix))
    twelve = np.stack([plain_steps(damped, b, 12) for b in j_t], axis=1)
    assert_close(some.values, j @ twelve, 1e-4)


def test_batches_and_memory_change_nothing(digits, monkeypatch):
    first = newton(digits)
    blocks = []
    real = gauss_newton_scores._solved

    def counted(matrix, gradients, ridge, steps):
        blocks.append(len(gradients))
        return real(matrix, gradients, ridge, steps)

    monkeypatch.setattr(gauss_newton_scores, "_solved", counted)
    monkeypatch.setattr(gauss_newton_scores, "newton_targets", lambda *_: (3, 0))
    second = newton(digits, batch_size=41)
    assert blocks == [3, 3, 1]
    assert_close(second.values, first.values, 1e-5)
    monkeypatch.undo()
    with refused("config.memory", "150 x 7 scores, and 18 vectors of 874 parameters"):
        newton(digits, memory_mb=0)
    sizes = {"n_train": 150, "n_targets": {"mine": 7}, "n_checkpoints": 1}
    given = {"proj_dim": None, "keep": "full", "top": 5, "divides": False}
    with refused("config.memory", "mine", "150 x 7 scores, and 18 vectors of 10000000 parameters"):
        check_memory(600, newton_params=10**7, **sizes, **given)
    check_memory(700, newton_params=10**7, **sizes, **given)


def test_the_files_are_those_of_any_scores(digits, tmp_path):
    """Two checkpoints, whose scores have the loss weights and the signs of other scores."""
    spec = scores_spec(
        ["c0", "c1"], digits.targets, model_output=digits.output, damping=DAMPING, **PROJECTION
    )
    parts = [tmp_path / f"{name}.h5" for name in ("c0", "c1")]
    for path in parts:
        compute_newton_scores(
            scores=path,
            checkpoint=digits.checkpoints[path.stem],
            study_file=digits.path,
            spec=spec.under(path.stem),
            targets=digits.targets,
            **ON_CPU,
        )
    scores = read_scores(averaged(tmp_path / "mine.h5", parts, spec))
    products = []
    for name in ("c0", "c1"):
        (_, f, _), _ = digits.jacobians[name]
        q = 1 / (1 + np.exp(f))
        products.append((newton(digits, checkpoint=name).values, q))
    values, weights = (np.mean(each, axis=0) for each in zip(*products, strict=True))
    assert_close(scores.to_numpy(), values * weights[:, None], 1e-5)
    usual = read_scores(digits.stages(tmp_path / "usual", 2, made=digits.features()))
    assert scores.index.tolist() == usual.index.tolist()
    assert scores.columns.tolist() == usual.columns.tolist()
    # The scores have another matrix but a similar meaning.
    agreement = np.corrcoef(scores.to_numpy().ravel(), usual.to_numpy().ravel())[0, 1]
    assert 0.5 < agreement < 0.999


@pytest.mark.parametrize(("name", "spoil"), [("bias", "fill_"), ("weight", "mul_")])
def test_numbers_that_are_not_finite_are_refused(digits, tmp_path, name, spoil):
    value = np.nan if name == "bias" else 1e25
    bad = digits.spoiled(
        tmp_path / "bad.pt", lambda state: getattr(state[f"8.{name}"], spoil)(value)
    )
    with pytest.raises(InputError, match="must be finite"):
        newton(digits, checkpoint=bad["bad"])


def test_outputs_and_models_without_a_gauss_newton_matrix_are_refused(digits, monkeypatch):
    with refused("model.no_loss_hessian"):
        newton(digits, model_output="loss")

    class OneWay(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Layer(nn.Module):
        def forward(self, x):
            return OneWay.apply(x)

    spec = features_spec(digits.output)
    loaded = LoadedModel.of_study(
        Study.load(digits.path), digits.checkpoints["c0"], spec, torch.device("cpu")
    )
    loaded.model.append(Layer())
    with refused("model.forward_mode", re.compile(r"RuntimeError: .*(?= Use)")):
        newton_scores(loaded, digits.train, digits.target_split, DAMPING, 64, 500)


# Shape of a sample's logits, its labels, and its training loss by torch.
LOSSES = {
    "image_classification": ((5,), 2, nn.functional.cross_entropy),
    "language_modelling": (
        (4, 5),
        [1, 3, -100, 2],
        lambda z, y: nn.functional.cross_entropy(z[:-1], y[1:], reduction="sum"),
    ),
    "masked_language_modelling": (
        (4, 5),
        [1, -100, 0, 2],
        lambda z, y: nn.functional.cross_entropy(z, y, reduction="sum"),
    ),
    "segmentation": (
        (3, 2, 2),
        [[0, 2], [-100, 1]],
        lambda z, y: nn.functional.cross_entropy(z[None], y[None]),
    ),
    "multi_label": (
        (3,),
        [1, -100, 0],
        lambda z, y: nn.functional.binary_cross_entropy_with_logits(
            z[y >= 0], y[y >= 0].double(), reduction="sum"
        ),
    ),
    "regression": ((1,), 0.3, lambda z, y: (z - y).square().sum() / 2),
}
ALIKE = {
    "text_classification": "image_classification",
    "sequence_to_sequence": "masked_language_modelling",
    "token_log_odds": "language_modelling",
}


def test_the_table_names_the_losses_with_a_hessian():
    assert {name for name, row in TABLE.items() if row.has_loss_hessian} == {*LOSSES, *ALIKE}


@pytest.mark.parametrize("name", [*LOSSES, *ALIKE])
def test_the_hessian_of_a_loss_in_its_logits(name):
    shape, label, loss = LOSSES[ALIKE.get(name, name)]
    generator = torch.Generator().manual_seed(0)
    z, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    y = torch.tensor(label)
    expected = torch.autograd.functional.hvp(lambda x: loss(x, y), z, v)[1]
    hessian = TABLE[name].load().loss_hessian
    torch.testing.assert_close(hessian(z, y, v), expected)
    several = torch.vmap(hessian)(z[None], y[None], v[None])[0]
    torch.testing.assert_close(several, expected)


def with_probability(name, z, y):
    """Numbers that draw each value of each part of a label, with the value's probability."""
    if name == "regression":
        return [[(0.25, 0.5), (0.75, 0.5)]]
    if name == "multi_label":
        p = z.sigmoid().tolist()
        pairs = [[(q / 2, q), ((1 + q) / 2, 1 - q)] for q in p]
    else:
        p = z.movedim(0, -1) if name == "segmentation" else z
        p = p.softmax(-1).reshape(-1, p.shape[-1])
        if name == "language_modelling":
            p = torch.cat([p[-1:], p[:-1]])  # logits predict the next token
        pairs = [
            list(zip((row.cumsum(0) - row / 2).tolist(), row.tolist(), strict=True)) for row in p
        ]
    is_used = (y.flatten() != -100).tolist()
    if name == "language_modelling":
        is_used[0] = False
    return [pair if used else [(0.5, 1)] for pair, used in zip(pairs, is_used, strict=True)]


@pytest.mark.parametrize("name", [*LOSSES, *ALIKE])
def test_the_noise_of_a_loss_has_its_hessian_as_covariance(name):
    """By an enumeration of all labels that can be drawn."""
    kind = ALIKE.get(name, name)
    shape, label, _ = LOSSES[kind]
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, output = torch.tensor(label), TABLE[name].load()
    draws = list(itertools.product(*with_probability(kind, z, y)))
    uniform = torch.tensor([[u for u, _ in draw] for draw in draws]).reshape(-1, *y.shape)
    weights = torch.tensor([[p for _, p in draw] for draw in draws], dtype=torch.float64).prod(1)
    noise = torch.vmap(output.loss_noise, in_dims=(None, None, 0))(z, y, uniform)
    assert noise.shape == (len(draws), *shape)
    rows = noise.flatten(1)
    basis = torch.eye(z.numel(), dtype=torch.float64).reshape(-1, *shape)
    hessian = torch.vmap(output.loss_hessian, in_dims=(None, None, 0))(z, y, basis).flatten(1)
    torch.testing.assert_close(rows.T @ (weights[:, None] * rows), hessian)
    torch.testing.assert_close(weights @ rows, torch.zeros(z.numel(), dtype=torch.float64))


TEXTS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def make_model():
    torch.manual_seed(0)
    config = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, initializer_range=0.3, **config))
    model.set_attn_implementation("sdpa")
    return model


def _texts(seed, n):
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(11, (3 + i % 4,), generator=generator) for i in range(n)]
    return [{"input_ids": text, "labels": text} for text in texts]


def train_data():
    return _texts(1, 10)


def target_data():
    return _texts(2, 3)
"""


def test_texts_of_different_lengths(tmp_path):
    """With padding, tied weights, and attention that is differentiated twice."""
    pytest.importorskip("transformers")
    path = tmp_path / "short_texts.py"
    path.write_text(TEXTS)
    study = Study.load(path)
    model = study.make_model()
    torch.save(model.state_dict(), tmp_path / "c0.pt")
    spec = features_spec("language_modelling")
    loaded = LoadedModel.of_study(Study.load(path), tmp_path / "c0.pt", spec, torch.device("cpu"))
    train, targets = study.split("train", None), study.split("mine", [0, 1, 2])
    scores = newton_scores(loaded, train, targets, DAMPING, 4, 200)
    model = model.double().eval()
    parameters = [*model.parameters()]

    def backward(value):
        gradients = torch.autograd.grad(value, parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in gradients])

    def gradient(text):
        p = model(text["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        log_p = p.gather(1, text["labels"][1:, None]).sum()
        return backward(log_p - torch.log1p(-log_p.exp())).numpy()

    matrix = 0.0
    for text in train.samples:
        logits = model(text["input_ids"][None]).logits[0, :-1]
        for row in logits:
            b = torch.stack([backward(z) for z in row])
            p = row.detach().softmax(0)
            matrix = matrix + b.T @ (torch.diag(p) - torch.outer(p, p)) @ b
    damped = matrix.numpy() + scores.ridge * np.eye(len(matrix))
    solved = [plain_steps(damped, gradient(targets.samples[i]), 12) for i in range(3)]
    j = np.stack([gradient(text) for text in train.samples])
    assert_close(scores.values, j @ np.stack(solved, axis=1), 1e-4)
