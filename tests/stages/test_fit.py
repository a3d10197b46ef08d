"""How well models predict their training samples is counted, and a bad fit is found.

Small networks are trained on data of each kind. Then their data or weights are changed. Pages that
state the fit: test_report.py.
"""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from trak_core import Attributor
from trak_core.attribution.model_fit import fit_of
from trak_core.model_outputs.about_outputs import about_output
from trak_core.runtime.progress import notice
from trak_core.study.dataset_split import Split

NETS = {
    "regression": lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)),
    "image_classification": lambda: nn.Linear(2, 3),
    "language_modelling": lambda: nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)),
    "multi_label": lambda: nn.Linear(3, 4),
    "segmentation": lambda: nn.Conv2d(1, 2, 1),
}
N = 160


def regression(random):
    x = torch.randn(N, 2, generator=random)
    return x, 3 * x[:, :1].squeeze(1) - x[:, 1].sin() + 2


def classes(random):
    labels = torch.arange(N) % 3 * (torch.arange(N) < 120)  # half are of class 0
    return torch.randn(N, 2, generator=random) + 4 * torch.eye(3)[labels][:, :2], labels


def sentences(random):
    """Return texts in which 0 mostly follows an odd token, and the next token an even one."""
    tokens = torch.randint(8, (N, 10), generator=random)
    for i in range(1, 10):
        after = torch.where(tokens[:, i - 1] % 2 == 1, 0, tokens[:, i - 1] + 1)
        keeps = torch.rand(N, generator=random) < 0.8
        tokens[:, i] = torch.where(keeps, after, tokens[:, i])
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[::3, 7:] = -100
    return tokens, labels


def signs(random):
    x = torch.randn(N, 3, generator=random)
    labels = (torch.cat([x, x[:, :1] + x[:, 1:2]], dim=1) > 0.4).long()
    labels[::4, 2] = -100
    return x, labels


def pixels(random):
    x = torch.randn(N, 1, 4, 4, generator=random)
    labels = (x[:, 0] > 0.3).long()
    labels[:, 0] = -100
    return x, labels


DATA = {
    "regression": regression,
    "image_classification": classes,
    "language_modelling": sentences,
    "multi_label": signs,
    "segmentation": pixels,
}


def logits_and_labels(kind, model, x, y):
    """Return logits of each part of a label, classes last, and these parts, -100 for none."""
    logits = model(x)
    if kind == "language_modelling":
        return logits[:, :-1], y[:, 1:]
    return (logits.movedim(1, -1) if kind == "segmentation" else logits), y


def loss_of(kind, model, x, y):
    logits, labels = logits_and_labels(kind, model, x, y)
    if kind == "regression":
        return mse_loss(logits.squeeze(1), labels)
    if kind == "multi_label":
        return binary_cross_entropy_with_logits(logits, labels.float(), (labels >= 0).float())
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.fixture(scope="module")
def trained():
    """Return data and a trained network of each kind."""
    made = {}
    for kind, data in DATA.items():
        torch.manual_seed(0)
        x, y = data(torch.Generator().manual_seed(0))
        net = NETS[kind]()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for _ in range(150):
            optimizer.zero_grad()
            loss_of(kind, net, x, y).backward()
            optimizer.step()
        made[kind] = x, y, net
    return made


def shuffled(x, y):
    return x, y[torch.randperm(N, generator=torch.Generator().manual_seed(5))]


def other_ids(x, y):
    """Return texts with other token ids, as from another tokenizer."""
    ids = torch.tensor([5, 2, 7, 1, 6, 0, 3, 4])
    return ids[x], torch.where(y < 0, y, ids[y.clamp(min=0)])


SPOILED = {
    "regression": {
        "columns permuted": lambda x, y: (x.flip(1), y),
        "label in other units": lambda x, y: (x, y / 1000),
        "label in larger units": lambda x, y: (x, y * 60),
        "label shifted": lambda x, y: (x, y + 10),
        "columns not scaled": lambda x, y: (x * 3 + 4, y),
        "labels of other samples": shuffled,
    },
    "image_classification": {
        "classes in another order": lambda x, y: (x, (y + 1) % 3),
        "inputs not scaled": lambda x, y: (-30 * x - 100, y),
    },
    "language_modelling": {"other ids": other_ids},
    "multi_label": {"labels in another order": lambda x, y: (x, y.flip(1))},
    "segmentation": {"pictures turned": lambda x, y: (x.flip(3), y)},
}
CASES = [
    *((kind, name) for kind in DATA for name in ("", "random weights")),
    *((kind, name) for kind, ways in SPOILED.items() for name in ways),
]


def spoiled_as(spoiled, kind, trained):
    """Return data and a network of a kind, with one of them changed, except for ``""``."""
    x, y, net = trained[kind]
    if spoiled == "random weights":
        # With other seeds some of these small networks are right by chance.
        torch.manual_seed(5 if kind == "image_classification" else 4)
        return x, y, NETS[kind]()
    return (*SPOILED[kind][spoiled](x, y), net) if spoiled else (x, y, net)


def expected(kind, net, x, y):
    """Return R2 or accuracy of the models and of a constant guess, by other functions."""
    with torch.no_grad():
        logits, labels = logits_and_labels(kind, net, x, y)
    if kind == "regression":
        return r2_score(labels, logits.squeeze(1)), 0.0
    said = (logits > 0).long() if kind == "multi_label" else logits.argmax(-1)
    pairs = zip(said.flatten().tolist(), labels.flatten().tolist(), strict=True)
    pairs = [(a, b) for a, b in pairs if b != -100]
    guess = Counter(b for _, b in pairs).most_common(1)[0][1] / len(pairs)
    return sum(a == b for a, b in pairs) / len(pairs), guess


def sentence_of(kind, value):
    """Return how the fit begins, given R2 or accuracy of the models."""
    if kind == "regression":
        return f"The models predict the labels of their training samples with an R2 of {value:.3g}."
    return f"The models predict {100 * value:.3g} % of the "


@pytest.mark.parametrize(("kind", "spoiled"), CASES)
def test_the_fit_is_counted_and_an_attributor_tells_of_a_bad_one(kind, spoiled, trained, capsys):
    x, y, net = spoiled_as(spoiled, kind, trained)
    samples = Split(list(zip(x, y, strict=True)), list(range(N)))
    for settings in ({"projection": "exact"}, {"proj_dim": 8}):
        notice.cache_clear()
        fitted = Attributor(net, kind, **settings).fit((x, y))
        told = "Notice: the models predict their training samples badly. The models predict "
        assert (told in capsys.readouterr().out) == bool(spoiled)
        table = fitted.score((x[:3], y[:3])).train.rename_axis("id").reset_index()
        fit = fit_of(table, about_output(kind), samples)
        value, guess = expected(kind, net, x, y)
        assert fit.measure.startswith(sentence_of(kind, value))
        assert kind == "regression" or f"right for {100 * guess:.3g} %." in fit.measure


def part_table(label, prediction):
    return pd.DataFrame({"id": range(len(label)), "label": label, "prediction": prediction})


OWN = {"function": "own.py:f", "label": "kind", "prediction": "guessed"}
NO_SAMPLES = Split([], [])


@pytest.mark.parametrize(
    ("about", "label", "prediction", "is_known"),
    [
        (OWN, [0, 1, 1, 2] * 9, [0, 1, 1, 1] * 9, False),
        (OWN, [10, 12, 9], [9, 11, 9], False),
        ("image_classification", [3, 3, 3, 3], [3, 3, 3, 3], True),
        ("regression", [7.5, 7.5, 7.5], [1.0, 2, 3], True),
        ("loss", [0, 0, 0], [1.0, 2, 3], False),
        ("clip", [1, 1, 1], [0.0, 0, 1], False),
    ],
)
def test_the_fit_of_tables(about, label, prediction, is_known):
    fit = fit_of(part_table(label, prediction), about_output(about), NO_SAMPLES)
    assert (fit is not None) == is_known
    assert not (fit and fit.is_doubtful)
    is_unknown = fit is not None and "so the fit is unknown" in fit.measure
    assert is_unknown == (about == "regression")  # All labels are equal.


@pytest.mark.parametrize(
    ("n_right", "is_doubtful"), [(600, True), (610, True), (700, False), (400, True), (1000, False)]
)
def test_random_predictions_are_no_fit(n_right, is_doubtful):
    """600 of 1000 samples are of the most frequent class. The right predictions are random."""
    label = (np.arange(1000) >= 600).astype(int)
    is_right = np.random.default_rng(0).permutation(1000) < n_right
    fit = fit_of(
        part_table(label, np.where(is_right, label, 1 - label)),
        about_output("image_classification"),
        NO_SAMPLES,
    )
    assert fit.is_doubtful == is_doubtful


@pytest.mark.parametrize(
    ("taken_for", "is_doubtful"),
    [
        ({1: 4, 4: 1}, True),
        ({1: 4, 4: 5, 5: 1}, True),
        ({1: 4}, False),  # all of class 1 are predicted wrong, all others right
        ({1: 4, 5: 4}, False),
        ({6: 1, 1: 6}, False),  # class 6 has four samples
    ],
)
def test_classes_that_are_taken_for_each_other_are_no_fit(taken_for, is_doubtful):
    """Six samples of class a are predicted as class b. Most samples of all are predicted right."""
    label = np.array([n for n in range(7) for _ in range(10 if n < 6 else 4)] + [0] * 60)
    moved = {a: np.flatnonzero(label == a)[:6] for a in taken_for}
    prediction = label.copy()
    for a, b in taken_for.items():
        prediction[moved[a]] = b
    table = part_table(label, prediction).sample(frac=1, random_state=0)
    fit = fit_of(table, about_output("image_classification"), NO_SAMPLES)
    assert fit.is_doubtful == is_doubtful
    said = "Most samples of class 1 are predicted as class 4, and most of class 4 as class "
    assert (f"{said}{taken_for.get(4)}." in fit.measure) == is_doubtful


def test_a_large_label_or_a_long_text_causes_no_warning():
    label = np.array([1e6, *range(20)], dtype=np.float32)
    fit = fit_of(part_table(label, label * 0.99), about_output("regression"), NO_SAMPLES)
    assert not fit.is_doubtful
    texts = Split([(torch.arange(n), torch.arange(n)) for n in (400, 5, 5)], [0, 1, 2])
    about = about_output("language_modelling")
    assert not fit_of(part_table([399, 4, 4], [200.0, 1, 1]), about, texts).is_doubtful
    assert fit_of(part_table([399, 4, 4], [1.0, 0, 0]), about, texts).is_doubtful
