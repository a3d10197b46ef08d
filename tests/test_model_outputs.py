import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from trak_core.model_outputs import MODEL_OUTPUTS, margin

CLASSIFICATION, REGRESSION = MODEL_OUTPUTS["image_classification"], MODEL_OUTPUTS["regression"]
LOGITS = torch.tensor([[0.3, -1.2, 2.0], [5.0, 5.0, 5.0], [-3.0, 0.0, 3.0]], dtype=torch.float64)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_margin_is_the_log_odds_of_the_label(label):
    for logits in LOGITS:
        p = torch.softmax(logits, 0)[label]
        torch.testing.assert_close(margin(logits, torch.tensor(label)), torch.log(p / (1 - p)))


@pytest.mark.parametrize("scale", [1e4, -1e4])
@pytest.mark.parametrize("label", [0, 2])
def test_margin_and_its_gradient_are_finite_for_extreme_logits(scale, label):
    logits = (LOGITS[0] * scale).float()
    value = margin(logits, torch.tensor(label))
    slope = grad(margin)(logits, torch.tensor(label))
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    assert slope[label] == 1


def test_loss_weight_of_a_confident_sample_is_not_rounded_to_zero():
    logits = torch.tensor([40.0, 0.0, 0.0])
    weight = CLASSIFICATION.loss_weight(margin(logits, torch.tensor(0)), torch.tensor(0))
    assert weight > 0
    np.testing.assert_allclose(weight.item(), 2 * np.exp(-40.0), rtol=1e-5)


def losses(name):
    """The loss as a function of f alone, whose derivatives Q and W must be."""
    if name == "image_classification":
        return lambda f, y: torch.nn.functional.softplus(-f)  # -log p_y for log-odds f
    return lambda f, y: (y - f) ** 2 / 2


@pytest.mark.parametrize("name", MODEL_OUTPUTS)
def test_loss_weight_and_curvature_are_derivatives_of_the_loss(name):
    output, loss = MODEL_OUTPUTS[name], losses(name)
    f, y = torch.linspace(-3, 3, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(vmap(output.loss_weight)(f, y), -vmap(grad(loss))(f, y))
    torch.testing.assert_close(vmap(output.curvature)(f, y), vmap(grad(grad(loss)))(f, y))


def test_cross_entropy_is_softplus_of_minus_the_margin():
    for logits in LOGITS:
        for label in range(3):
            f = margin(logits, torch.tensor(label))
            expected = torch.nn.functional.cross_entropy(logits, torch.tensor(label))
            torch.testing.assert_close(torch.nn.functional.softplus(-f), expected)


def test_predictions():
    assert vmap(CLASSIFICATION.prediction)(LOGITS).tolist() == [2, 0, 2]
    assert REGRESSION.prediction(torch.tensor([1.5])).item() == 1.5
    assert CLASSIFICATION.n_classes(LOGITS[0]) == 3
    assert REGRESSION.n_classes(torch.tensor([1.5])) is None


@pytest.mark.parametrize("name", MODEL_OUTPUTS)
def test_gradient_of_the_output_by_finite_differences(name):
    output = MODEL_OUTPUTS[name]
    logits = LOGITS[0] if name == "image_classification" else LOGITS[0, :1]
    label = torch.tensor(1 if name == "image_classification" else 0.5)
    assert torch.autograd.gradcheck(
        lambda x: output.value(x, label), (logits.clone().requires_grad_(),)
    )
