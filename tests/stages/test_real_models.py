"""Features of common architectures, against plain autograd and the reference projection."""

import re

import numpy as np
import pytest
import torch
from oracle import projected
from pipeline import ON_CPU, features_spec
from refused import refused
from torch.nn.functional import cross_entropy

from trak_core.artifacts import FEATURES, open_artifact
from trak_core.attribution.sample_outputs import model_output
from trak_core.errors import InputError
from trak_core.settings import NormalSpec
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_scores import compute_normal_matrix
from trak_core.study.dataset_split import Split

models = pytest.importorskip("models", reason="needs transformers, which `make test` has")
N_TRAIN, N_TARGETS, PROJ_DIM = 64, 5, 32

# The name in models of a model and its samples, and the model output.
CASES = {
    "ResNet": ("resnet", "image_classification"),
    "BERT, named inputs": ("bert", "text_classification"),
    "BERT, positional inputs": ("PositionalBert", "text_classification"),
    "GPT-2": ("gpt2", "language_modelling"),
    "segmentation": ("Segmenter", "segmentation"),
    "CLIP": ("clip", "clip"),
}


def f_and_q(model, output, sample, others):
    """Return f and Q of one sample by their definitions, in float64."""
    if isinstance(sample, dict):
        named = {k: v[None] for k, v in sample.items() if k != "labels"}
        returned, label = model(**named), sample.get("labels")
    else:
        returned, label = model(*(x[None] for x in sample[:-1])), sample[-1]
    if output == "clip":
        u, v = returned.image_embeds[0], returned.text_embeds[0]
        s = model.logit_scale.detach().exp()
        among_texts = torch.stack([s * (u @ w - u @ v) for _, w in others])
        among_images = torch.stack([s * (w @ v - u @ v) for w, _ in others])
        margins = -torch.stack([among_texts.logsumexp(0), among_images.logsumexp(0)])
        return margins.sum(), (1 - torch.sigmoid(margins)).mean()
    if output == "segmentation":
        p = returned["out"][0].softmax(0).gather(0, label[None])[0]
        return torch.log(p / (1 - p)).mean(), (1 - p).mean()
    logits = returned if isinstance(returned, torch.Tensor) else returned.logits
    if output == "language_modelling":
        labels = torch.where(sample["attention_mask"].bool(), label, -100)
        p = torch.exp(-cross_entropy(logits[0, :-1], labels[1:], reduction="sum"))
    else:
        p = logits[0].softmax(0)[label]
    return torch.log(p / (1 - p)), 1 - p


def doubled(sample):
    if isinstance(sample, dict):
        return {k: v.double() if v.is_floating_point() else v for k, v in sample.items()}
    return tuple(v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in sample)


class Case:
    def __init__(self, name, dtype, folder):
        make, self.output = CASES[name]
        self.study, self.checkpoint = folder / "study.py", folder / "c0.pt"
        self.name, sizes = make, {"n_train": N_TRAIN, "n_targets": N_TARGETS}
        self.study.write_text(models.STUDY.format(name=make, dtype=dtype, **sizes))
        self.model = getattr(models, make)().to(getattr(torch, dtype))
        torch.save(self.model.state_dict(), self.checkpoint)

    def features(self, folder, split="train", kind="rademacher", **job):
        file, output = folder / "features.h5", self.output
        targets = None if split == "train" else list(range(N_TARGETS))
        spec = features_spec(output, PROJ_DIM, kind=kind, split=split, targets=targets)
        job = ON_CPU | {"checkpoint": self.checkpoint, "study_file": self.study} | job
        compute_features(features=file, spec=spec, targets=targets, **job)
        return file

    def expected(self, n, kind="rademacher"):
        """Return projected gradients, f and Q of the first samples by plain autograd, float64."""
        model = self.model.double().eval()
        samples = [doubled(models.sample(self.name, i, torch.float64)) for i in range(N_TRAIN)]
        others = []
        if self.output == "clip":
            with torch.no_grad():
                found = [model(**{k: v[None] for k, v in s.items()}) for s in samples]
            others = [(r.image_embeds[0], r.text_embeds[0]) for r in found]
        parameters = list(model.parameters())
        rows, outputs, weights = [], [], []
        for sample in samples[:n]:
            f, q = f_and_q(model, self.output, sample, others)
            gradients = torch.autograd.grad(f, parameters, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
            outputs.append(f.item())
            weights.append(q.item())
        features = projected(torch.stack(rows).numpy(), PROJ_DIM, kind, parameters=parameters)
        return features, np.array(outputs), np.array(weights)


def read(file):
    with open_artifact(file, FEATURES) as artifact:
        vectors = ("outputs", "loss_weights", "labels", "predictions")
        return artifact.matrix("features")[:], *(artifact.vector(key) for key in vectors)


# Allowed error of features, relative to the largest entry: a few rounding errors of the dtype.
PRECISION = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}


# Every model in float32 and in a 16-bit type; sketches by factors and by formed gradients.
SHORT = dict(zip(CASES, 3 * ("float16", "bfloat16"), strict=True))
WAYS = [
    *((name, dtype, "rademacher", True) for name in CASES for dtype in ("float32", SHORT[name])),
    *(
        (name, "float32", "tensor_sketch", by_factors)
        for name in CASES
        for by_factors in (True, False)
    ),
    ("GPT-2", "bfloat16", "tensor_sketch", True),
]


@pytest.mark.gate
@pytest.mark.parametrize(("name", "dtype", "kind", "by_factors"), WAYS)
def test_features_equal_plain_autograd(name, dtype, kind, by_factors, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "trak_core.attribution.project_gradients.prefers_factors", lambda *_: by_factors
    )
    case = Case(name, dtype, tmp_path)
    file = case.features(tmp_path, batch_size=48 if kind == "rademacher" else 9, kind=kind)
    features, outputs, weights, labels, predictions = read(file)
    expected, f, q = case.expected(16, kind)
    for found, wanted in ((features[:16], expected), (outputs[:16], f), (weights[:16], q)):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=PRECISION[dtype] * abs(wanted).max())
    assert features.shape == (N_TRAIN, PROJ_DIM)
    assert np.isfinite(features).all()
    assert labels.shape == predictions.shape == (N_TRAIN,)


@pytest.mark.parametrize("name", CASES)
def test_one_pass_serves_them_without_a_notice(name, tmp_path, capsys):
    Case(name, "float32", tmp_path).features(tmp_path, split="mine")
    assert "Notice" not in capsys.readouterr().out


def test_a_model_of_pairs_needs_a_scale_and_its_inputs():
    pairs = Split([(torch.zeros(3), torch.ones(3))] * 2, [0, 1])
    with refused("attribution.logit_scale", re.compile(r"one parameter `logit_scale`. .*Found 0")):
        model_output("clip", Pair(), pairs, torch.device("cpu"))
    with pytest.raises(InputError, match=r"of \(1, 3\) float32, \(1, 3\) float32, .* TypeError"):
        model_output("clip", torch.nn.Linear(3, 3), pairs, torch.device("cpu"))


class Pair(torch.nn.Module):
    def forward(self, image, text):
        return image, text


def test_a_normal_matrix_with_curvature_needs_some(tmp_path):
    case = Case("segmentation", "float32", tmp_path)
    features = case.features(tmp_path)
    of_features = features_spec(case.output, PROJ_DIM)
    spec = NormalSpec(features=of_features, weighting="curvature", curvature_power=0.75)
    with refused("stages.no_curvature", "segmentation", features):
        job = {"normal_matrix": tmp_path / "matrix.h5", "code": "code", "memory_mb": 100}
        compute_normal_matrix(features=features, spec=spec, **job)
