"""Masked, encoder-decoder and prompt-tuned language models against transformers' own loss."""

import pytest
import torch
from refused import refused
from torch.nn.functional import cross_entropy

from trak_core.attribution.batch_by_length import order_samples
from trak_core.attribution.sample_outputs import model_output
from trak_core.gradients import (
    as_batch,
    check_labels,
    check_samples_apart,
    count_classes,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    select_parameters,
)
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.study.dataset_split import Split

texts = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
CPU = torch.device("cpu")


def tokens(length):
    return torch.randint(2, texts.VOCABULARY, (length,))


def pairs(*sizes, mask=None):
    """Sources and targets of the given lengths, with a mask of the first ``mask`` source tokens."""
    samples = []
    for source, target in sizes:
        sample = {"input_ids": tokens(source), "labels": tokens(target)}
        if mask is not None:
            sample["attention_mask"] = (torch.arange(source) < mask).long()
        samples.append(sample)
    return samples


def masked(*lengths):
    """Texts with every third token masked."""
    samples = []
    for n in lengths:
        whole, hidden = tokens(n), torch.arange(n) % 3 == 0
        inputs, labels = torch.where(hidden, 1, whole), torch.where(hidden, whole, -100)
        samples.append({"input_ids": inputs, "labels": labels})
    return samples


def causal(*lengths):
    return [{"input_ids": ids, "labels": ids} for ids in map(tokens, lengths)]


RAGGED = (5, 4), (9, 7), (3, 6), (7, 2)
CASES = {
    "T5, ragged": ("t5", "sequence_to_sequence", lambda: pairs(*RAGGED)),
    "T5, one length": ("t5", "sequence_to_sequence", lambda: pairs((6, 6), (6, 6), mask=3)),
    "T5, as long as its targets": ("t5", "sequence_to_sequence", lambda: pairs((5, 5), (3, 3))),
    "BART, ragged": ("bart", "sequence_to_sequence", lambda: pairs(*RAGGED)),
    "BERT, ragged": ("bert", "masked_language_modelling", lambda: masked(4, 9, 7)),
    "prompt tuning": ("prompted", "language_modelling", lambda: causal(6, 4, 9)),
}


def by_the_loss(model, parameters, sample):
    """f and gradients of one text without padding, from the loss that transformers computes."""
    pair = {name: torch.stack([tensor, tensor]) for name, tensor in sample.items()}
    with torch.enable_grad():
        returned = model(**pair)
        if hasattr(model, "peft_config"):  # whose loss is float32
            loss = cross_entropy(returned.logits[0, 3:-1], sample["labels"][1:], reduction="sum")
        else:
            loss = returned.loss * (sample["labels"] != -100).sum()
        f = -torch.log(torch.expm1(loss))
        return f, torch.autograd.grad(f, list(parameters.values()), allow_unused=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by PEFT itself
@pytest.mark.parametrize("name", CASES)
def test_features_of_padded_texts_are_those_of_the_loss_alone(name, capsys):
    torch.manual_seed(0)
    make, kind, data = CASES[name]
    samples, model, output = data(), getattr(texts, make)().double().eval(), TABLE[kind].load()
    with torch.no_grad():
        for parameter in model.parameters():  # otherwise attention is nearly uniform
            parameter += 0.3 * torch.randn(parameter.shape)
    parameters = select_parameters(model, None)
    (ordered,) = order_samples([Split(samples, list(range(len(samples))))], model, output)
    batch = ordered.batch(0, len(samples))
    check_samples_apart(model, output, batch)
    check_labels(batch.labels, output, count_classes(model, output, batch, CPU), ordered.split.ids)
    method = gradient_method(model, parameters, output, batch)
    assert method is gradients_at_once, capsys.readouterr().out
    found = formed_gradients(method, model, parameters, output, batch)
    for i, sample in enumerate(ordered.split.samples):
        f, gradients = by_the_loss(model, parameters, sample)
        torch.testing.assert_close(found.outputs[i], f.detach(), rtol=1e-8, atol=1e-8)
        for key, gradient in zip(parameters, gradients, strict=True):
            own = found.gradients[key][i]
            expected = torch.zeros_like(own) if gradient is None else gradient
            torch.testing.assert_close(own, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("make", "kind", "warns"),
    [
        ("bert", "language_modelling", True),
        ("bert", "masked_language_modelling", False),
        ("gpt2", "language_modelling", False),
    ],
)
def test_a_masked_model_with_a_causal_output_is_noticed(make, kind, warns, capsys):
    model_output(kind, getattr(texts, make)(), None, CPU)
    assert ("BertForMaskedLM is a masked language model" in capsys.readouterr().out) is warns


def test_decoder_inputs_that_are_shifted_belong_to_another_output():
    labels = torch.tensor([[3, 4, 5]])
    sample = {"input_ids": labels, "decoder_input_ids": torch.tensor([[0, 3, 4]])}
    with refused("gradients.decoder_inputs"):
        as_batch({**sample, "labels": labels}, LANGUAGE_MODELLING)
    as_batch({**sample, "decoder_input_ids": labels, "labels": labels}, LANGUAGE_MODELLING)


def test_missing_labels_and_decoder_inputs_are_refused():
    sample = {"input_ids": torch.tensor([[3, 4, 5]])}
    with refused("gradients.sample_form", "input_ids", "`labels` are the `input_ids`"):
        as_batch(sample, LANGUAGE_MODELLING)
    batch = as_batch({**sample, "labels": sample["input_ids"]}, LANGUAGE_MODELLING)
    with refused("gradients.no_decoder_inputs", "sequence_to_sequence"):
        count_classes(texts.t5(), LANGUAGE_MODELLING, batch, CPU)
