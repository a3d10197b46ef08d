"""Gramians of model outputs, and exact scores from Gramians."""

import numpy as np
import pytest
import torch
from architectures import Net, linear
from gramians import by_autograd, gramian_of
from torch import nn

from trak_core.attribution.solve import DampedGramian
from trak_core.gradients import select_parameters
from trak_core.model_outputs.clip import contrast
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import IGNORED
from trak_core.model_outputs.supervised import SEGMENTATION

WRITER = {
    "embedding": lambda: nn.Embedding(5, 4),
    "layer": lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
    "head": linear(4, 5),
}


def write(m, tokens):
    """A causal transformer of one layer."""
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
    return m.head(m.layer(m.embedding(tokens), src_mask=mask, is_causal=True))


def two_towers(m, image, tokens):
    embeddings = m.image(image), m.text(tokens).mean(1)
    return tuple(nn.functional.normalize(part, dim=-1) for part in embeddings)


def tokens_with_padding():
    tokens = torch.randint(0, 5, (6, 7))
    return tokens, torch.where(torch.arange(7) < torch.arange(2, 8)[:, None], tokens, IGNORED)


# Classification and regression: test_torch_workarounds.py and test_gramian.py.
KINDS = {
    "language_modelling": (LANGUAGE_MODELLING, lambda: Net(write, WRITER), tokens_with_padding),
    "segmentation": (
        SEGMENTATION,
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)),
        lambda: (torch.randn(6, 1, 3, 4), torch.randint(0, 3, (6, 3, 4))),
    ),
    "contrast": (
        contrast(torch.randn(3, 4), torch.randn(3, 4), 2.0),
        lambda: Net(two_towers, {"image": linear(3, 4), "text": lambda: nn.Embedding(5, 4)}),
        lambda: (torch.randn(6, 3), torch.randint(0, 5, (6, 4))),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_backward_pass_serves_every_model_output(kind, one_pass_only):
    output, make, draw = KINDS[kind]
    model = make().eval().double()
    samples = [x.double() if x.is_floating_point() else x for x in draw()]
    parameters = select_parameters(model, None)
    *inputs, labels = samples if output.has_labels else (*samples, None)
    gradients, _ = by_autograd(model, output, inputs, labels)
    j = torch.cat([rows.flatten(1) for rows in gradients.values()], dim=1)
    gramian = gramian_of(model, parameters, output, samples)
    np.testing.assert_allclose(gramian, j @ j.T, rtol=1e-9, atol=1e-12)


RNG = np.random.default_rng(0)
J, J_T = RNG.standard_normal((9, 20)), RNG.standard_normal((4, 20))


@pytest.mark.parametrize("damping", [0.01, 2.0])
@pytest.mark.parametrize("weights", [RNG.random(9), np.array([0, 1, 0, 2, 3, 1, 1e-9, 1, 1])])
@pytest.mark.parametrize("n_params", [20, 6])
def test_exact_scores_equal_the_formula(n_params, weights, damping):
    """J (J^T W J + ridge I)^-1 J_t^T in the space of the parameters, and the norm for J_t = J."""
    j, j_t = J[:, :n_params], J_T[:, :n_params]
    ridge = damping * np.mean(weights * (j**2).sum(1))
    left = j @ np.linalg.inv((j.T * weights) @ j + ridge * np.eye(n_params))
    damped = DampedGramian.factorize(j @ j.T, weights, damping)
    scores = damped.similarities(j @ j_t.T)
    np.testing.assert_allclose(scores, left @ j_t.T, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(damped.ridge, ridge)
    q = np.linspace(-1, 2, 9)
    norm = np.linalg.norm(q[:, None] * (left @ j.T))
    np.testing.assert_allclose(damped.train_norm(q), norm, rtol=1e-9)


def test_exact_scores_without_damping():
    """With fewer samples than parameters, the limit of ever less damping."""
    weights = 0.5 + RNG.random(9)
    damped = DampedGramian.factorize(J @ J.T, weights, 0)
    limit = J @ np.linalg.pinv((J.T * weights) @ J, rcond=1e-10) @ J_T.T
    np.testing.assert_allclose(damped.similarities(J @ J_T.T), limit, rtol=1e-8)
    assert damped.ridge == 0
