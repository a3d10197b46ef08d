"""Batches of texts of different lengths: padded, cut again, and what memory they may take."""

import itertools
import re

import pytest
import torch
from refused import refused

from trak_core.attribution.batch_by_length import order_samples
from trak_core.gradients import Batch, as_batch, joined, select_parameters, shapes_of
from trak_core.gradients.batch_size import in_chunks, memory_by_length, sample_memory
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.supervised import CLASSIFICATION
from trak_core.study.dataset_split import Split


class Takes(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


class TakesNone(torch.nn.Module):
    def forward(self, input_ids, image):
        return input_ids


def samples(*lengths, **more):
    inputs = {"input_ids": lambda n: torch.arange(1, n + 1), **more, "labels": lambda n: [7] * n}
    return [{name: make(n) for name, make in inputs.items()} for n in lengths]


def arrange(data, model=None, window=None):
    split = Split(data, [f"t{i}" for i in range(len(data))])
    (found,) = order_samples([split], model or Takes(), LANGUAGE_MODELLING, window)
    return found


def test_what_stands_where_a_text_has_ended():
    """0, and -100 for labels; a mask is made; what has no row a token stays as it is."""
    image = {"image": lambda n: torch.ones(2, 2)}
    for model, names in ((Takes(), ["input_ids", "image", "attention_mask"]), (TakesNone(), None)):
        found = arrange(samples(2, 4, **image), model)
        batch = found.batch(0, 2)
        assert found.split.ids == ["t1", "t0"]
        assert batch.kwargs["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
        assert batch.labels.tolist() == [[7] * 4, [7, 7, -100, -100]]
        assert batch.kwargs["image"].shape == (2, 2, 2)
        assert list(batch.kwargs) == (names or ["input_ids", "image"])
        if names:
            assert batch.kwargs["attention_mask"].tolist() == [[1] * 4, [1, 1, 0, 0]]


def test_texts_that_differ_are_named_with_their_split():
    splits = [Split(samples(3, **more), [0]) for more in ({}, {"x": lambda n: torch.ones(2)})]
    with refused("gradients.different_inputs", "in sample 0, but", "in sample 0 of the targets."):
        order_samples(splits, Takes(), LANGUAGE_MODELLING)


@pytest.mark.parametrize(
    ("of_decoder", "labels"),
    [
        ({}, [7, 7, 7, 7]),
        ({"decoder_attention_mask": torch.tensor([[1, 1, 1, 0]])}, [7, 7, 7, -100]),
    ],
)
def test_the_mask_of_an_encoder_leaves_a_decoder_s_labels_alone(of_decoder, labels):
    tokens = torch.full((1, 4), 7)
    source = {"input_ids": tokens, "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    sample = {**source, "decoder_input_ids": tokens, **of_decoder, "labels": tokens}
    assert as_batch(sample, LANGUAGE_MODELLING).labels.tolist() == [labels]


def test_rows_are_padded_no_further_than_the_longest_of_them():
    batch = arrange(samples(5, 3, 2), TakesNone()).batch(0, 3)
    part = batch.rows(slice(1, 3))
    assert part.labels.shape == part.kwargs["input_ids"].shape == (2, 3)
    assert part.lengths.tolist() == [3, 2]
    assert len(batch.rows(slice(3, 3))) == 0
    again = joined([batch.rows(slice(0, 1)), part])
    for one, other in zip((*again.tensors(),), (*batch.tensors(),), strict=True):
        assert torch.equal(one[1], other[1])
    assert torch.equal(again.labels, batch.labels)


@pytest.mark.parametrize("window", [1, 3, 4, 10, 50])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_each_window_is_put_back_in_order(window, batch_size):
    lengths = [3, 9, 4, 4, 8, 2, 7, 7, 5, 6]
    found = arrange(samples(*lengths), window=window)

    def compute(start, stop):
        batch = found.batch(start, stop)
        assert batch.lengths[0] == batch.lengths.max()
        return [batch.lengths, torch.arange(stop - start)]

    chunks = in_chunks(compute, 10, found.batches_of(batch_size))
    places, seen = [], []
    for start, stop, (own, _) in found.in_order(chunks):
        places.append((start, stop))
        seen += own.tolist()
    assert seen == lengths
    starts = range(0, 10, window)
    assert places == [(start, min(start + window, 10)) for start in starts]


def test_shapes_are_compared_with_those_of_all_samples_before():
    """The third agrees with the first alone."""
    parts = [
        Batch((), {"x": torch.zeros(1, n)}, torch.zeros(1, length))
        for n, length in ((5, 5), (4, 4), (5, 3))
    ]
    seen = list(zip("abc", parts, strict=True))
    assert shapes_of(seen[:2], LANGUAGE_MODELLING).token_inputs == {"x"}
    shapes = re.compile(r"\(5,\) in sample a, .* in sample c")
    with refused("gradients.different_shapes", "x", shapes):
        shapes_of(seen, LANGUAGE_MODELLING)
    other = Batch((), {"y": torch.zeros(1, 5)}, torch.zeros(1, 5))
    with refused("gradients.different_inputs", "x, labels in sample a", "y, labels in sample d"):
        shapes_of([*seen[:1], ("d", other)], LANGUAGE_MODELLING)
    samples = [(torch.zeros(1, n), torch.zeros(1)) for n in (5, 5, 4)]
    images = [(i, as_batch(sample, CLASSIFICATION)) for i, sample in enumerate(samples)]
    assert not shapes_of(images[:2], CLASSIFICATION).differ
    shapes = "(5,) in sample 0", "(4,) in sample 2"
    with refused("gradients.different_shapes", "argument 0", *shapes):
        shapes_of(images, CLASSIFICATION)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", ["gpt2", "llama"])
def test_memory_between_two_lengths_is_at_most_what_is_said(make, attention):
    """Attention that is written out keeps the square of the tokens."""
    texts = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
    model = getattr(texts, make)()
    model.set_attn_implementation(attention)
    found = arrange(samples(*range(3, 30, 3)), model)
    few = joined([found.batch(i, i + 1) for i in found.few(8)])
    what = model, select_parameters(model, None), LANGUAGE_MODELLING
    said = memory_by_length(*what, few)
    taken = []
    for i in range(len(found)):
        taken.append(sample_memory(*what, found.batch(i, i + 1)).activation_bytes)
        assert taken[-1] <= said.at(found.lengths[i]).activation_bytes
    assert taken[0] == said.of_longest.activation_bytes
    assert all(a > b for a, b in itertools.pairwise(taken))
