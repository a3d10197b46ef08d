"""Each model output against its definition: value, gradient, loss weight, curvature, noise."""

import itertools
import math
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refused import refused
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, softplus

from trak_core.attribution.score_formulas import improving_signs
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.model_outputs.clip import contrast, drawn_pairs
from trak_core.model_outputs.language_modelling import (
    LANGUAGE_MODELLING,
    MASKED_LANGUAGE_MODELLING,
    SEQUENCE_TO_SEQUENCE,
    TOKEN_LOG_ODDS,
)
from trak_core.model_outputs.model_output import IGNORED, over_samples, read_logits
from trak_core.model_outputs.supervised import (
    CLASSIFICATION,
    LOSS,
    MULTI_LABEL,
    REGRESSION,
    SEGMENTATION,
)

sequence_log_odds = LANGUAGE_MODELLING.value

LOGITS = torch.tensor([[0.3, -1.2, 2.0], [5.0, 5.0, 5.0], [-3.0, 0.0, 3.0]], dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clip_output(scale=3.0):
    return contrast(normal(5, 4, seed=1), normal(5, 4, seed=2), scale)


TOKENS = torch.tensor([4, 1, IGNORED, 3, 0, IGNORED])
LABELS = torch.tensor([1, 0, IGNORED, 1, 0])
PIXELS = torch.tensor([[0, 1, 2], [2, IGNORED, 1]])
# Output, what a model returned for one sample, label.
CASES = {
    "classification": (CLASSIFICATION, LOGITS[0], torch.tensor(1)),
    "regression": (REGRESSION, normal(1), torch.tensor(0.5)),
    "language": (LANGUAGE_MODELLING, normal(6, 5), TOKENS),
    "masked": (MASKED_LANGUAGE_MODELLING, normal(6, 5), TOKENS),
    "from a source": (SEQUENCE_TO_SEQUENCE, normal(6, 5), TOKENS),
    "tokens": (TOKEN_LOG_ODDS, normal(6, 5), TOKENS),
    "multi-label": (MULTI_LABEL, normal(5), LABELS),
    "segmentation": (SEGMENTATION, normal(3, 2, 3), PIXELS),
    "contrast": (clip_output(), normal(2, 4), torch.tensor(1)),
    "loss": (LOSS, normal(1), torch.tensor(1)),
}
# Those whose loss is log(1 + exp(-f)).
LOG_ODDS = ["classification", "language", "masked", "from a source", "multi-label"]


def cross_entropies(name, outputs, label):
    """Return the cross entropies that a case's loss is made of, one a margin."""
    if name == "multi-label":
        counted = label != IGNORED
        return binary_cross_entropy_with_logits(
            outputs[counted], label[counted].double(), reduction="none"
        )
    if name in {"language", "tokens"}:
        outputs, label = outputs[:-1], label[1:]
    if CASES[name][0].label_ndim == 1:
        return cross_entropy(outputs, label, reduction="none")[label != IGNORED]
    if name == "segmentation":
        losses = cross_entropy(outputs[None], label[None], reduction="none")[0]
        return losses[label != IGNORED]
    if name == "contrast":
        (u, v), images, texts = outputs, normal(5, 4, seed=1), normal(5, 4, seed=2)
        rows = torch.stack([u @ v, *(texts @ u)]), torch.stack([u @ v, *(images @ v)])
        return torch.stack([cross_entropy(3 * row, torch.tensor(0)) for row in rows])
    return cross_entropy(outputs[None], label[None], reduction="none")


@pytest.mark.parametrize("scale", [1, 0.01, 12])
@pytest.mark.parametrize("name", CASES)
def test_gradient_by_finite_differences(name, scale):
    output, outputs, label = CASES[name]
    assert torch.autograd.gradcheck(
        lambda x: output.value(x, label), ((outputs * scale).requires_grad_(),)
    )


@pytest.mark.parametrize("m", [[8.0, 9.0], [14.5, 15.5], [15.5, 20.0], [3.0, 30.0], [40.0, -5.0]])
def test_gradient_of_confident_tokens_by_finite_differences(m):
    margins = torch.tensor(m, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sequence_log_odds(*sequence(x)), (margins,))


@pytest.mark.parametrize("name", CASES)
def test_vmap_gives_what_a_loop_gives(name):
    output, outputs, label = CASES[name]
    batch = torch.stack([outputs, outputs * -2, outputs + 0.1])
    functions = output.value, output.loss_weight, grad(output.value)
    for function in (*functions, *filter(None, [output.prediction, output.curvature])):
        expected = torch.stack([function(x, label) for x in batch])
        torch.testing.assert_close(vmap(function, (0, None))(batch, label), expected)


@pytest.mark.parametrize("name", LOG_ODDS)
def test_loss_is_softplus_of_minus_the_log_odds(name):
    output, outputs, label = CASES[name]
    for scale in (1, 0, -3, 7):
        loss = cross_entropies(name, outputs * scale, label).sum()
        torch.testing.assert_close(softplus(-output.value(outputs * scale, label)), loss)


@pytest.mark.parametrize("name", LOG_ODDS)
def test_loss_weight_and_curvature_of_log_odds_by_autograd(name):
    """Along any direction of the logits, the loss moves by -Q df."""
    output, outputs, label = CASES[name]
    loss_slope = grad(lambda x: cross_entropies(name, x, label).sum())(outputs)
    slope = grad(output.value)(outputs, label)
    torch.testing.assert_close(-output.loss_weight(outputs, label) * slope, loss_slope)
    f = output.value(outputs, label)
    torch.testing.assert_close(
        output.curvature(outputs, label), grad(grad(lambda f: softplus(-f)))(f)
    )


def test_loss_weight_and_curvature_of_regression_by_autograd():
    label = torch.tensor(0.5, dtype=torch.float64)

    def loss(f):
        return (label - f) ** 2 / 2

    for f in torch.linspace(-3, 3, 7, dtype=torch.float64):
        torch.testing.assert_close(REGRESSION.loss_weight(f, label), -grad(loss)(f))
        torch.testing.assert_close(REGRESSION.curvature(f, label), grad(grad(loss))(f))


@pytest.mark.parametrize("name", ["segmentation", "contrast", "tokens"])
def test_loss_weight_of_a_mean_of_margins_by_autograd(name):
    """Q is -dl/df as all margins move alike: f by one, each by one over their share in f."""
    output, outputs, label = CASES[name]
    margins = -torch.log(torch.expm1(cross_entropies(name, outputs, label)))
    share = 1 if name == "segmentation" else 1 / len(margins)
    reduce = torch.mean if name == "segmentation" else torch.sum
    loss_slope = grad(lambda d: reduce(softplus(-(margins + share * d))))(torch.zeros(()).double())
    torch.testing.assert_close(output.loss_weight(outputs, label), -loss_slope)
    torch.testing.assert_close(output.value(outputs, label), reduce(margins))
    assert output.curvature is None


NOISY = [name for name, (output, *_) in CASES.items() if output.loss_noise is not None]


def with_probability(name, z, y):
    """Numbers that draw each value of each part of a label, with the value's probability."""
    if name == "regression":
        return [[(0.25, 0.5), (0.75, 0.5)]]
    if name == "multi-label":
        p = z.sigmoid().tolist()
        pairs = [[(q / 2, q), ((1 + q) / 2, 1 - q)] for q in p]
    else:
        p = z.movedim(0, -1) if name == "segmentation" else z
        p = p.softmax(-1).reshape(-1, p.shape[-1])
        if name in {"language", "tokens"}:
            p = torch.cat([p[-1:], p[:-1]])  # logits predict the next token
        pairs = [
            list(zip((row.cumsum(0) - row / 2).tolist(), row.tolist(), strict=True)) for row in p
        ]
    is_used = (y.flatten() != IGNORED).tolist()
    is_used[0] &= name not in {"language", "tokens"}
    return [pair if used else [(0.5, 1)] for pair, used in zip(pairs, is_used, strict=True)]


@pytest.mark.parametrize("name", NOISY)
def test_the_noise_of_a_loss_has_its_hessian_as_covariance(name):
    """By an enumeration of all labels that can be drawn."""
    output, z, y = CASES[name]

    def loss(x):
        if name == "regression":
            return (x - y).square().sum() / 2
        losses = cross_entropies(name, x, y)
        return losses.mean() if name == "segmentation" else losses.sum()

    draws = list(itertools.product(*with_probability(name, z, y)))
    uniform = torch.tensor([[u for u, _ in draw] for draw in draws]).reshape(-1, *y.shape)
    weights = torch.tensor([[p for _, p in draw] for draw in draws], dtype=torch.float64).prod(1)
    noise = torch.vmap(output.loss_noise, in_dims=(None, None, 0))(z, y, uniform)
    assert noise.shape == (len(draws), *z.shape)
    rows = noise.flatten(1)
    covariance = rows.T @ (weights[:, None] * rows)
    hessian = torch.autograd.functional.hessian(loss, z)
    torch.testing.assert_close(covariance, hessian.reshape(covariance.shape))
    torch.testing.assert_close(weights @ rows, torch.zeros(z.numel(), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e4, -1e4])
@pytest.mark.parametrize("name", CASES)
def test_finite_for_extreme_logits(name, scale, dtype):
    output, outputs, label = CASES[name]
    if name == "contrast":
        scale /= 100  # inner products of such embeddings, times the scale, reach 1e4
    outputs = (outputs / outputs.abs().max() * scale).to(dtype)
    functions = output.value, grad(output.value), output.loss_weight, output.curvature
    numbers = [function(outputs, label) for function in functions if function is not None]
    assert all(torch.isfinite(x).all() for x in numbers)
    assert numbers[0].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert numbers[1].abs().max() > 0


def test_loss_weight_of_a_confident_sample_is_not_rounded_to_zero():
    weight = CLASSIFICATION.loss_weight(torch.tensor([40.0, 0.0, 0.0]), torch.tensor(0))
    np.testing.assert_allclose(weight.item(), 2 * np.exp(-40.0), rtol=1e-5)


def sequence(margins):
    """Return logits of a vocabulary of two whose labels have these margins."""
    logits = torch.stack([torch.zeros_like(margins), margins], dim=1)
    logits = torch.cat([logits, torch.zeros(1, 2, dtype=margins.dtype)])
    return logits, torch.ones(len(margins) + 1, dtype=torch.long)


@pytest.mark.parametrize("m", [-30.0, -1.0, 0.0, 2.0, 6.9, 7.0, 14.9, 15.1, 40.0, 2e4])
def test_sequence_log_odds_of_one_token_is_its_margin(m):
    margins = torch.tensor([m], dtype=torch.float64)
    torch.testing.assert_close(sequence_log_odds(*sequence(margins)), margins[0])
    slope = grad(lambda x: sequence_log_odds(*sequence(x)))(margins)
    torch.testing.assert_close(slope, torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("m", [20.0, 50.0, 3e3])
def test_sequence_log_odds_of_certain_tokens(m):
    """1 - P is the sum of the tokens' e^-m, far below what 1 - P can show."""
    value = sequence_log_odds(*sequence(torch.full((3,), m)))
    torch.testing.assert_close(value, torch.tensor(m - math.log(3)), rtol=1e-6, atol=1e-6)


def test_ignored_tokens_change_nothing():
    logits = normal(6, 5)
    other = logits.clone()
    other[[1, 4, 5]] = 1e4  # rows that predict ignored tokens, or nothing
    assert torch.equal(sequence_log_odds(logits, TOKENS), sequence_log_odds(other, TOKENS))
    slope = grad(sequence_log_odds)(logits, TOKENS)
    assert torch.equal(slope.abs().sum(1) > 0, torch.tensor([1, 0, 1, 1, 0, 0]).bool())


def test_drawn_pairs_are_uniform_and_fixed_by_the_seed():
    assert drawn_pairs(100, 10, 3) == drawn_pairs(100, 10, 3) != drawn_pairs(100, 10, 4)
    assert drawn_pairs(4, 10, 0) == [0, 1, 2, 3]
    counts = np.zeros(20)
    for seed in range(2000):
        drawn = drawn_pairs(20, 5, seed)
        assert len(set(drawn)) == 5
        counts[drawn] += 1
    # Each is drawn 500 times, give or take 19.
    assert np.abs(counts - 500).max() < 5 * 19.4


def test_predictions_and_labels_as_numbers():
    assert vmap(CLASSIFICATION.prediction)(LOGITS, torch.zeros(3)).tolist() == [2, 0, 2]
    assert CLASSIFICATION.n_classes(LOGITS[0]) == 3
    assert REGRESSION.prediction(torch.tensor([1.5]), torch.tensor(0.0)).item() == 1.5
    assert REGRESSION.n_classes(torch.tensor([1.5])) is None
    right = nn.functional.one_hot(torch.tensor([1, 0, 3, 4, 0, 0]), 5).double()
    assert LANGUAGE_MODELLING.prediction(right, TOKENS) == 2  # tokens 1 and 3, but not 0
    assert LANGUAGE_MODELLING.label_number(TOKENS) == 3
    assert LANGUAGE_MODELLING.n_classes(right) == 5
    assert TOKEN_LOG_ODDS.prediction(right, TOKENS) == 2
    assert MULTI_LABEL.prediction(torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]), LABELS) == 2
    assert MULTI_LABEL.label_number(LABELS) == 4
    pixels = nn.functional.one_hot(torch.tensor([[0, 1, 2], [2, 0, 0]]), 3).movedim(-1, 0).double()
    assert SEGMENTATION.prediction(pixels, PIXELS) == 4
    assert SEGMENTATION.label_number(PIXELS) == 5
    assert SEGMENTATION.n_classes(pixels) == 3
    sure = torch.eye(4)[:1].expand(2, 4) * 9
    assert contrast(torch.zeros(3, 4), torch.zeros(3, 4), 1.0).prediction(sure, TOKENS) == 1


def test_a_loss_is_read_before_logits():
    loss, logits = torch.ones(2), torch.zeros(2, 3)
    both = {"loss": loss, "logits": logits}
    for returned in (loss, {"loss": loss}, both, SimpleNamespace(**both), (loss, logits)):
        assert LOSS.read(returned) is loss
    assert LOSS.read({"loss": None, "logits": loss}) is loss
    with refused("gradients.output_shape", "(3,)"):
        over_samples(LOSS.value, LOSS.read({"loss": logits}), torch.ones(2))


def test_labels_of_another_number_than_the_logits_are_refused():
    with refused("model_outputs.labels", "(3,)", "(5,)"):
        MULTI_LABEL.value(torch.zeros(3), LABELS)


def test_what_a_model_returns():
    logits = torch.zeros(2, 3)
    mappings = {"logits": logits}, OrderedDict(out=logits, aux=None)
    for returned in (logits, SimpleNamespace(logits=logits), *mappings, (logits, None)):
        assert read_logits(returned) is logits
    for returned in (None, {"loss": logits}, (), SimpleNamespace(), "logits"):
        with refused("model_outputs.returned", f"Found {type(returned).__name__}"):
            read_logits(returned)


def test_what_a_model_of_pairs_returns():
    u, v = torch.zeros(2, 3), torch.ones(2, 3)
    read = clip_output().read
    for returned in (
        SimpleNamespace(image_embeds=u, text_embeds=v),
        {"image_features": u, "text_features": v, "logit_scale": torch.ones(())},
        (u, v, torch.ones(())),
    ):
        assert torch.equal(read(returned), torch.stack([u, v], 1))
    for returned in (u, {"loss": u}, (u,), SimpleNamespace(image_embeds=u, text_embeds=None)):
        with refused("model_outputs.embeddings", f"Found {type(returned).__name__}"):
            read(returned)


def test_rows_say_if_a_loss_has_noise_and_loss_weights_are_probabilities():
    """By samples that a model is sure of, half sure of, or sure to be otherwise."""
    cases = {id(case[0]): case for case in CASES.values()}
    for name, about in TABLE.items():
        output, x, label = CASES["contrast"] if about.needs_pairs else cases[id(about.load())]
        scales = (1e2, 10, 1, 0, -1, -10, -1e2)
        found = [output.loss_weight(x * scale, label).item() for scale in scales]
        within = min(found) >= 0 and max(found) <= 1 and len(set(found)) > 1
        assert within == about.weight_is_probability, name
        assert about.has_loss_noise == (output.loss_noise is not None)


@pytest.mark.parametrize("name", CASES)
def test_a_row_says_which_output_is_better(name):
    """The sign of Q = -dl/df, at predictions below and above labels."""
    output, x, label = CASES[name]
    (better,) = {
        about.better
        for about in TABLE.values()
        if (about.needs_pairs and name == "contrast")
        or (not about.needs_pairs and about.load() is output)
    }
    found = set()
    for scale in (-3, -1, 0.5, 3):
        number = (output.prediction or output.value)(x * scale, label)
        labels, predictions = (np.array([n.item()]) for n in (output.label_number(label), number))
        (sign,) = improving_signs(better, labels, predictions)
        assert np.sign(output.loss_weight(x * scale, label).item()) == sign
        found.add(int(sign))
    assert found == ({-1, 1} if name == "regression" else {1})
