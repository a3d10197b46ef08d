"""Model outputs of a user's own: the examples', beside plain autograd, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pages import blocks
from pipeline import EXACTLY, features_spec, read_scores, run_exact_stages, run_stages
from refused import refused
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    normalize,
    softplus,
)
from trained_cases import assert_close

from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.sample_outputs import model_output, outputs_and_predictions
from trak_core.config.read_config import check_config
from trak_core.gradients import (
    check_samples_apart,
    count_classes,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    select_parameters,
)
from trak_core.gradients.model_inputs import as_batch
from trak_core.model_outputs.about_outputs import TABLE, output_name
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING
from trak_core.model_outputs.model_output import ModelOutput, over_samples, own_output
from trak_core.model_outputs.supervised import REGRESSION
from trak_core.study.study import Study

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
CPU = torch.device("cpu")
SCHEMA = yaml.safe_load((REPOSITORY / "workflow/schemas/config.schema.yaml").read_text())


def cox(model, sample):
    patient, at_risk, event = sample
    own, others = model(patient[None], at_risk[None])[0].split([1, len(at_risk)])
    return event * torch.log(torch.exp(own[0]) / (torch.exp(own[0]) + torch.exp(others).sum()))


def contrastive(model, sample):
    embed = nn.Sequential(*model)
    u, v = (normalize(embed(x[None]))[0] for x in sample)
    scans = torch.tensor(load_digits().data[400:450]).float() / 16
    others = normalize(embed(scans)).detach()
    return -cross_entropy(5 * torch.cat([(u @ v)[None], others @ u])[None], torch.tensor([0]))


def policy(model, sample):
    scan, (action, advantage) = sample
    return -advantage * cross_entropy(model(scan[None]), action.long()[None])


# The number that each example explains, for one sample.
BY_HAND = {
    "multi_label": lambda model, s: (
        -binary_cross_entropy_with_logits(model(s[0][None])[0], s[1], reduction="sum")
    ),
    "diffusion": lambda model, s: -mse_loss(model(s[0][None], s[1][None])[0], s[2]),
    "contrastive": contrastive,
    "cox": cox,
    "ranking": lambda model, s: model(s[0][None, :1])[0, 0] - model(s[0][None, 1:])[0, 0],
    "policy": policy,
}
TARGETS = [0, 1, 2]
DAMPING = 2


def config_of(name):
    return yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each example's study, and the file of a network that its ``train`` left."""
    made = {}
    for name in BY_HAND:
        study = Study.load(EXAMPLES / f"{name}.py")
        checkpoint = tmp_path_factory.mktemp("trained") / f"{name}.pt"
        torch.save(study.function("train")(seed=0, epochs=2).state_dict(), checkpoint)
        made[name] = study, checkpoint
    return made


def by_hand(name, model, samples):
    """f and gradient of each sample, by a backward pass of its own."""
    values, rows = [], []
    for i in range(len(samples)):
        f = BY_HAND[name](model, samples[i])
        gradient = torch.autograd.grad(f, list(model.parameters()))
        values.append(f.detach())
        rows.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(values).double().numpy(), torch.stack(rows).double().numpy()


@pytest.mark.parametrize("name", BY_HAND)
def test_f_and_gradients_by_autograd_in_one_pass(name, trained, capsys):
    study, checkpoint = trained[name]
    spec = features_spec(config_of(name)["model_output"]["function"], **EXACTLY)
    made = Study.load(study.path)
    loaded = LoadedModel.of_study(made, checkpoint, spec, CPU)
    split = made.split("train", None)
    samples = as_batch(split.batch(0, 20), loaded.output)
    given = loaded.model, loaded.parameters, loaded.output, samples
    method = gradient_method(*given)
    assert method is gradients_at_once, capsys.readouterr().out
    formed = formed_gradients(method, *given)
    rows = torch.cat([block.flatten(1) for block in formed.gradients.values()], dim=1)
    values, gradients = by_hand(name, loaded.model, split.take(split.ids[:20]).samples)
    assert_close(formed.outputs, values, 1e-5)
    assert_close(rows, gradients, 1e-5)
    # As a model that is retrained is asked.
    pool = split.take(split.ids[:20])
    asked, _ = outputs_and_predictions(loaded.model, spec.model_output, split, pool, 7, made)
    assert_close(asked, values, 1e-5)


def test_exact_scores_with_loss_weights_of_an_own_output_are_the_formula_s(trained, tmp_path):
    """Gradients of every example are checked above, and scores of any in test_scores.py."""
    study, checkpoint = trained["ranking"]
    given = config_of("ranking")["model_output"]
    run = study.path, {"run0": checkpoint}, TARGETS
    exact = read_scores(
        run_exact_stages(tmp_path, *run, model_output=given["function"], damping=DAMPING)
    )
    model = study.make_model()
    model.load_state_dict(torch.load(checkpoint))
    f, phi = by_hand("ranking", model, study.split("train", None).samples)
    _, of_targets = by_hand("ranking", model, study.split("target", TARGETS).samples)
    kernel = phi @ phi.T
    kernel += DAMPING * np.diag(kernel).mean() * np.eye(len(phi))
    solved = np.linalg.solve(kernel, phi @ of_targets.T)
    assert_close(exact, solved / (1 + np.exp(f))[:, None], 1e-5)


def test_tables_of_an_output_without_descriptions(trained, tmp_path):
    study, checkpoint = trained["policy"]
    run = study.path, {"run0": checkpoint}, TARGETS
    name = config_of("policy")["model_output"]["function"]
    scores = run_stages(tmp_path, *run, model_output=name, proj_dim=8, output_words={})
    table = pd.read_hdf(scores, "train")
    # The label is [action, advantage]. A table has its mean, and f in place of a prediction.
    labels = torch.stack([sample[1].mean() for sample in study.split("train", None).samples])
    assert np.allclose(table["label"], labels)
    assert np.array_equal(table["prediction"], table["output"])


class Pair(nn.Module):
    """Returns what models return beside plain tensors."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.Linear(3, 1)

    def forward(self, x):
        return {"one": self.one(x), "more": (self.other(x), None), "scale": self.one.bias.sum()}


def test_whatever_a_model_returns():
    """A dict of tensors, a tuple in it, a number for all samples, and None."""

    def f(returned, label):
        return (returned["one"] * label).sum() * returned["more"][0][0]

    torch.manual_seed(0)
    model, output = Pair(), own_output(f, "f")
    parameters = select_parameters(model, None)
    x, labels = torch.randn(5, 3), torch.randn(5, 2)
    batch = as_batch((x, labels), output)
    method = gradient_method(model, parameters, output, batch)
    assert method is gradients_at_once
    formed = formed_gradients(method, model, parameters, output, batch)
    for i in range(5):
        one, other = model.one(x[i]), model.other(x[i])
        expected = torch.autograd.grad((one * labels[i]).sum() * other[0], [*parameters.values()])
        for found, gradient in zip(formed.gradients.values(), expected, strict=True):
            torch.testing.assert_close(found[i], gradient)
    check_samples_apart(model, output, batch)

    scaled = own_output(lambda returned: returned["one"].sum() * returned["scale"], "scaled")
    values = over_samples(scaled.value, model(x), torch.ones(5))
    torch.testing.assert_close(values, model.one(x).sum(1) * model.one.bias.sum())


def test_what_a_user_makes_is_an_output():
    x, label = torch.tensor([3.0, 4.0]), torch.tensor([1, 0])
    own = own_output(lambda returned, label: (returned * label).sum(), "f")
    assert (own.value(x, label), own.loss_weight(x, label)) == (3, 1)
    assert own.curvature is None
    assert own.has_labels
    assert not own_output(lambda returned: returned.sum(), "f").has_labels
    assert not own_output(lambda returned, **options: returned.sum(), "f").has_labels
    whole = ModelOutput(value=lambda x, _: x.sum(), loss_weight=lambda x, _: x[0], label_ndim=0)
    assert own_output(whole, "f").loss_weight(x, label) == 3
    assert own_output(whole, "f").label_ndim == 0
    # Of its tokens' margins alone f can't be computed.
    changed = replace(LANGUAGE_MODELLING, value=lambda logits, label: logits.square().sum())
    assert not own_output(changed, "f").joins_tokens


def test_a_class_that_is_predicted_stays_one():
    """Integers are classes, of which the commonest is taken; of any other number the mean is."""

    def predicted(prediction):
        output = own_output(ModelOutput(value=lambda x, _: x.sum(), prediction=prediction), "f")
        return over_samples(output.prediction, torch.eye(9)[[3, 1]], torch.zeros(2)).numpy()

    for prediction in (lambda x, _: x.argmax(), lambda x, _: x.argmax().to(torch.uint8)):
        classes = predicted(prediction)
        assert classes.dtype == np.int64
        assert classes.tolist() == [3, 1]
    assert predicted(lambda x, _: x[3] > 0).dtype == np.float32
    assert own_output(lambda x, _: x.argmax(), "f").value(torch.eye(2)[1], LABELS) == 1.0


def ask(f, model=None, labels=None):
    """What the start of every job does with an output."""
    model, output = model or nn.Linear(3, 2), own_output(f, "outputs.py:f")
    samples = (torch.ones(4, 3),) if labels is None else (torch.ones(4, 3), labels)
    count_classes(model, output, samples, CPU)
    check_samples_apart(model, output, samples)
    return gradient_method(model, select_parameters(model, None), output, samples)


LABELS = torch.zeros(4, dtype=torch.int64)


def test_randomness_is_refused_wherever_it_comes_from():
    line = re.compile(r"/\S+test_own_outputs.py:\d+: .*LABELS\)")
    with refused("model_outputs.random", line):
        ask(lambda x, label: (x * torch.randn_like(x)).sum(), labels=LABELS)
    random = np.random.default_rng(0)
    with refused("model_outputs.random", re.compile(r"[\d.]+, then [\d.]+")):
        ask(lambda x, label: x.sum() * 5.0 + float(random.integers(1000)), labels=LABELS)


def test_what_is_no_number_of_a_sample_is_refused():
    for f, found in (
        (lambda x, label: x, "shape (2,)"),
        (lambda x, label: x.sum(0, keepdim=True), "shape (1,)"),
        (lambda x, label: 3.0, "float"),
        (lambda x, label: None, "NoneType"),
    ):
        with refused("model_outputs.number", "outputs.py:f", found):
            ask(f, labels=LABELS)
    line = re.compile(r"/\S+test_own_outputs.py:\d+: .*LABELS\)")
    with refused("model_outputs.vmap", "outputs.py:f", line):
        ask(lambda x, label: x.sum() * label.item(), labels=LABELS)
    with refused("model_outputs.vmap", "outputs.py:f", line):
        ask(lambda x, label: x.sum() if label > 0 else -x.sum(), labels=LABELS)
    with refused("model_outputs.failed", "outputs.py:f", "KeyError", line):
        ask(lambda x, label: {"a": x}["logits"].sum(), labels=LABELS)
    with refused("gradients.model_rows", "3 rows", "batch of 1"):
        ask(lambda x: x.sum(), model=nn.Flatten(0))


def test_what_is_no_output_is_refused():
    for made, found in ((3, "int"), (ModelOutput, "the class ModelOutput"), ("f", "str")):
        with refused("model_outputs.own", "outputs.py:f", found):
            own_output(made, "outputs.py:f")
    with refused("model_outputs.arguments", "(x, label, model)"):
        own_output(lambda x, label, model: x, "outputs.py:f")
    with refused("model_outputs.arguments", "(x, label=None)"):
        own_output(lambda x, label=None: x, "outputs.py:f")
    with refused("model_outputs.arguments", "a function without a signature"):
        own_output(torch.sum, "outputs.py:f")


def test_a_name_that_the_file_has_not_is_refused(trained):
    study, _ = trained["cox"]
    there = "Risk, partial_likelihood, make_model, train_data, target_data, train"
    with refused("model_outputs.no_function", "no likelihood", "examples/cox.py", there):
        model_output("examples/cox.py:likelihood", nn.Linear(1, 1), None, CPU, study)


def test_an_output_in_a_file_of_its_own(trained, tmp_path):
    """Beside any study; the study's own functions don't count there."""
    study, _ = trained["cox"]
    (tmp_path / "outputs.py").write_text("def risk(risks):\n    return risks[0]\n")
    output = model_output(f"{tmp_path}/outputs.py:risk", nn.Linear(1, 1), None, CPU, study)
    assert output.value(torch.tensor([2.0, 1.0]), torch.tensor(1)) == 2
    assert not output.has_labels


def test_the_page_says_what_is(tmp_path):
    page = blocks("docs/how-to/own-output.md")
    one, several = (text for info, text in page if info == "python outputs.py")
    given = [yaml.safe_load(text) for info, text in page if info == "yaml"]
    for config in given:
        check_config(config_of("cox") | config, SCHEMA)
    (tmp_path / "outputs.py").write_text(one + several)
    named = [output_name(config["model_output"]).partition(":")[2] for config in given]
    likelihood, order = (
        model_output(f"{tmp_path}/outputs.py:{name}", nn.Identity(), None, CPU) for name in named
    )
    x, label = torch.tensor([0.3]), torch.tensor(1.0)
    assert likelihood.value(x, label) == REGRESSION.loss_weight(x, label) ** 2 / -2
    points = torch.tensor([0.3, -0.5], dtype=torch.float64)
    f = order.value(points, label)
    slope = torch.func.grad(lambda f: softplus(-f))
    torch.testing.assert_close(order.loss_weight(points, label), -slope(f))
    torch.testing.assert_close(order.curvature(points, label), torch.func.grad(slope)(f))
    text = (REPOSITORY / "docs/how-to/own-output.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.M) == list(BY_HAND)
    assert len(TABLE) == 11
