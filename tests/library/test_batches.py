"""Inputs and labels of a batch, parameters of a model, and what is refused of them."""

import re
from types import SimpleNamespace

import pytest
import torch
from architectures import Net
from refused import refused
from torch import nn

from trak_core.gradients import (
    as_batch,
    formed_gradients,
    gradients_at_once,
    gradients_one_by_one,
    select_parameters,
)
from trak_core.gradients.check_gradients import check_labels, count_classes
from trak_core.model_outputs.clip import contrast
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING, MASKED_LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION, REGRESSION, SEGMENTATION

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("output", "labels", "error"),
    [
        (CLASSIFICATION, [0, 5], ("label_value", "integers from 0 to 4", 5, "sample b")),
        (CLASSIFICATION, [0.0, 1.0], ("label_dtype", "0 to 4", "torch.float32")),
        (CLASSIFICATION, [True, False], ("label_dtype", "0 to 4", "torch.bool")),
        (CLASSIFICATION, [[0], [1]], ("label_shape", "(2, 1)")),
        (REGRESSION, [0.0, torch.inf], ("label_value", "inf", "sample b")),
        (LANGUAGE_MODELLING, [[0, 1], [2, 7]], ("label_value", 7, "sample b")),
        (LANGUAGE_MODELLING, [[0, 1], [2, -100]], ("empty_label", "sample b")),
        (LANGUAGE_MODELLING, [0, 1], ("label_shape", "(2,)")),
        (SEGMENTATION, [[0, 1], [2, 1]], ("label_shape", "(2, 2)")),
        (SEGMENTATION, [[[0, 1]], [[255, 1]]], ("label_value", 255, "sample b")),
    ],
)
def test_bad_labels(output, labels, error):
    with refused(f"gradients.{error[0]}", *error[1:]):
        n_classes = None if output is REGRESSION else 5
        check_labels(torch.tensor(labels), output, n_classes, ["a", "b"])


def test_class_0_of_a_label_of_any_shape_counts():
    output = ModelOutput(value=lambda x, label: x[label], n_classes=len)
    for labels in ([0, 3], [[0, 0], [0, -100]]):
        check_labels(torch.tensor(labels), output, 5, ["a", "b"])
    for labels in ([0, -100], [[0, 1], [-100, -100]]):
        with refused("gradients.empty_label", "sample b"):
            check_labels(torch.tensor(labels), output, 5, ["a", "b"])


def test_counting_classes():
    batch = (torch.zeros(2, 4), torch.tensor([0, 1]))

    def count(model, output=CLASSIFICATION, batch=batch):
        return count_classes(model, output, batch, CPU)

    flat = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    parts = {"linear": lambda: nn.Linear(4, 3)}
    with_logits = Net(lambda m, x: SimpleNamespace(logits=m.linear(x)), parts)
    assert count(nn.Linear(4, 3)) == count(with_logits) == 3
    assert count(flat, REGRESSION) is None
    with refused("gradients.model_call", "(1, 4) float32", re.compile(r"RuntimeError: .*")):
        count(nn.Linear(5, 3))
    for model in (nn.Linear(4, 1), flat):
        with refused("gradients.too_few_classes", "It returns 1"):
            count(model)
    with refused("gradients.output_shape", "Found (3,)", "(3,)", "()"):
        count(nn.Linear(4, 3), REGRESSION)
    with refused("gradients.model_call", "x (1, 4) float32", re.compile(r"TypeError: .*'x'")):
        count(nn.Linear(4, 3), batch={"x": batch[0], "labels": batch[1]})


def test_what_a_model_returns_must_fit_the_labels():
    images, pixels = torch.zeros(2, 3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long)
    coarse = nn.Conv2d(3, 5, 2, stride=2)
    error = re.compile(r"RuntimeError: .*(?=\. For this)")
    with refused("gradients.output_shape", "(5, 4, 4)", "(8, 8)", error):
        count_classes(coarse, SEGMENTATION, (images, pixels), CPU)
    assert count_classes(nn.Conv2d(3, 5, 1), SEGMENTATION, (images, pixels), CPU) == 5


def test_telling_inputs_and_labels_apart():
    x, y = torch.zeros(2, 4), torch.tensor([0, 1])
    for samples in ((x, y), [x, y], {"labels": y, "input": x}):
        batch = as_batch(samples, CLASSIFICATION)
        assert torch.equal(batch.labels, y)
        assert [id(tensor) for _, tensor in batch.tensors()] == [id(x)]
        assert len(as_batch(batch, CLASSIFICATION).rows(slice(0, 1))) == 1
    pairs = contrast(x, x, 1.0)
    assert as_batch((x, x), pairs).labels.tolist() == [1, 1]
    assert list(as_batch({"image": x, "text": x}, pairs).kwargs) == ["image", "text"]


@pytest.mark.parametrize(
    ("samples", "code", "values"),
    [
        ((torch.zeros(2),), "sample_form", ["a tuple of 1"]),
        ({"x": torch.zeros(2), "label": torch.ones(2)}, "sample_form", ["a dict with x, label"]),
        ({"labels": torch.zeros(2)}, "sample_form", ["a dict with labels"]),
        ((torch.zeros(3, 1), torch.zeros(2)), "batch_rows", ["2 labels", "argument 0", "(3, 1)"]),
    ],
)
def test_samples_without_labels_or_inputs(samples, code, values):
    with refused(f"gradients.{code}", *values):
        as_batch(samples, CLASSIFICATION)


@pytest.mark.parametrize(
    ("output", "first"), [(LANGUAGE_MODELLING, -100), (MASKED_LANGUAGE_MODELLING, 6)]
)
def test_padding_is_never_predicted_and_predicts_no_token(output, first):
    """The first token of a text padded on the left is not scored, as without padding."""
    ids = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4], [0, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0], [1] * 4, [0, 1, 1, 1]])
    for labels in (ids, torch.where(mask > 0, ids, -100)):
        batch = as_batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, output)
        assert batch.labels.tolist() == [[5, 6, 7, -100], [8, 9, 3, 4], [-100, first, 7, 8]]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    assert list(select_parameters(model, None)) == ["1.weight", "1.bias"]
    # A pattern that matches trainable parameters selects no frozen ones.
    assert list(select_parameters(model, ["*.weight"])) == ["1.weight"]
    assert not model[0].weight.requires_grad
    model.requires_grad_(False)
    with refused("gradients.no_parameter", "All of its 4 parameters are frozen"):
        select_parameters(model, None)


def test_patterns_of_nothing_and_parameters_that_are_no_real_numbers_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with refused("gradients.unmatched_pattern", "'lora'", "0.weight, 0.bias, 1.weight, 1.bias"):
        select_parameters(model, ["0.*", "lora"])
    quantized = torch.zeros(3, 3, dtype=torch.int8)
    model[0].weight = nn.Parameter(quantized, requires_grad=False)
    assert "0.weight" not in select_parameters(model, None)
    with refused("gradients.parameter_dtype", "0.weight torch.int8"):
        select_parameters(model, ["*.bias", "0.weight"])
    model = nn.Linear(2, 1)
    model.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with refused("gradients.parameter_dtype", "filter torch.complex64"):
        select_parameters(model, None)
    assert list(select_parameters(model, ["weight"])) == ["weight"]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (lambda: nn.LazyLinear(3), "1.weight, 1.bias"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "1.running_mean, 1.running_var"),
    ],
)
def test_lazy_parameters_are_refused(layer, names):
    model = nn.Sequential(nn.Linear(2, 2), layer())
    with refused("gradients.lazy_parameter", names):
        select_parameters(model, ["0.*"])


def test_frozen_parameters_that_only_a_pattern_names_are_differentiated():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    batch = torch.randn(4, 3), torch.randn(4)

    def gradients(method, patterns):
        parameters = select_parameters(model, patterns)
        return formed_gradients(method, model, parameters, REGRESSION, batch).gradients

    ours = gradients(gradients_at_once, ["0.*", "*.bias"])
    assert list(ours) == ["0.weight", "0.bias", "2.bias"]
    model.requires_grad_(True)
    torch.testing.assert_close(ours, gradients(gradients_one_by_one, ["0.*", "2.bias"]))
    model.requires_grad_(False)
    assert list(select_parameters(model, ["0.w*"])) == ["0.weight"]
    assert [p.requires_grad for p in model.parameters()] == [True, False, False, False]
