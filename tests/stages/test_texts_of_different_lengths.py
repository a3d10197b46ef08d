"""Texts of different lengths in every kind of job, against autograd of each text alone."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from oracle import projected
from pipeline import ON_CPU, features_spec
from refusals import preflight
from refused import refused
from trained_cases import assert_close

from trak_core.artifacts import FEATURES, GRAMIAN, OUTPUTS, open_artifact
from trak_core.attribution import loaded_model, write_features
from trak_core.errors import InputError
from trak_core.gradients import gradient_terms
from trak_core.settings import EXACT
from trak_core.stages import compute_outputs as outputs_stage
from trak_core.stages.compute_features import compute_features
from trak_core.stages.compute_gramian import compute_gramian
from trak_core.stages.compute_outputs import compute_embeddings, compute_outputs
from trak_core.stages.join_shards import join_shards

texts = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
N_TRAIN, PROJ_DIM, OUTPUT = 30, 32, "language_modelling"
MODELS = {
    "GPT-2": ("gpt2", ()),
    "GPT-2, masks": ("gpt2", ("attention_mask",)),
    "GPT-2, positions": ("gpt2", ("position_ids",)),
    "Llama": ("llama", ()),
    "no mask": ("plain", ()),
    "BERT": ("bert", ()),
}


class Case:
    def __init__(self, name, folder):
        self.make, self.keys = MODELS.get(name, (name, ()))
        self.folder, self.checkpoint = folder, folder / "c0.pt"
        self.study = folder / "study.py"
        self.write()
        torch.manual_seed(0)
        self.model = getattr(texts, self.make)()
        with torch.no_grad():
            for parameter in self.model.parameters():  # otherwise attention is nearly uniform
                parameter += 0.3 * torch.randn(parameter.shape)
        torch.save(self.model.state_dict(), self.checkpoint)
        self.ids = [f"text-{i}" for i in range(N_TRAIN)]

    def write(self, more=""):
        study = texts.STUDY.format(make=self.make, n_train=N_TRAIN, keys=self.keys)
        self.study.write_text(study + more)

    def samples(self, split="train"):
        return texts.data(*((N_TRAIN, 0) if split == "train" else (7, 1)), self.keys)

    def gradients(self, split="train"):
        return texts.gradients(self.model, self.samples(split))

    def common(self, **settings):
        return ON_CPU | {"checkpoint": self.checkpoint, "study_file": self.study} | settings

    def features(self, name, kind="rademacher", split="train", **settings):
        file = self.folder / f"{name}.h5"
        targets = None if split == "train" else list(range(7))
        spec = features_spec(OUTPUT, PROJ_DIM, kind=kind, split=split, targets=targets)
        compute_features(features=file, spec=spec, targets=targets, **self.common(**settings))
        return file

    def gramian(self, split, **settings):
        file = self.folder / f"gramian-{split}-{len(list(self.folder.iterdir()))}.h5"
        targets = None if split == "train" else [5, 2, 0, 6]
        spec = features_spec(OUTPUT, PROJ_DIM, split=split, targets=targets)
        spec = replace(spec, projection={"kind": EXACT})
        compute_gramian(gramian=file, spec=spec, targets=targets, **self.common(**settings))
        with open_artifact(file, GRAMIAN) as artifact:
            ids = artifact.index("gramian"), artifact.columns("gramian")
            return artifact.matrix("gramian")[:], artifact.vector("outputs"), ids

    def preflight(self):
        splits = {"train": None, "mine": [0, 2]}
        return preflight(self.study, splits, model_output=OUTPUT)


@pytest.fixture
def case(request, tmp_path):
    return Case(getattr(request, "param", "GPT-2"), tmp_path)


@pytest.fixture
def small_windows(monkeypatch):
    """Sort texts by length within several windows."""
    monkeypatch.setattr(write_features, "_WINDOW_BYTES", 0)
    monkeypatch.setattr(write_features, "_LEAST_WINDOW", 7)


def read(file):
    with open_artifact(file, FEATURES) as artifact:
        columns = [artifact.vector(key) for key in ("labels", "outputs", "predictions")]
        return artifact.index("features"), artifact.matrix("features")[:], *columns


def assert_same(file, expected_file):
    for column, expected in zip(read(file), read(expected_file), strict=True):
        if isinstance(expected, list):
            assert column == expected
        else:
            assert_close(column, expected, 1e-5)


@pytest.mark.parametrize("case", MODELS, indirect=True)
def test_features_equal_autograd_of_each_text(case, capsys):
    assert case.preflight()["n_samples"] == {"train": N_TRAIN, "mine": 2}
    (expected, rows), (_, rows_of_mine) = case.gradients(), case.gradients("mine")
    for kind in ("rademacher", "tensor_sketch"):
        ids, features, labels, outputs, _ = read(case.features("train", kind))
        assert "Notice" not in capsys.readouterr().out
        assert ids == case.ids
        assert_close(
            features, projected(rows, PROJ_DIM, kind, parameters=case.model.parameters()), 1e-5
        )
        assert_close(outputs, expected, 1e-5)
        assert labels.tolist() == [len(sample["labels"]) - 1 for sample in case.samples()]
    _, features, *_ = read(case.features("mine", kind, split="mine"))
    parameters = case.model.parameters()
    assert_close(features, projected(rows_of_mine, PROJ_DIM, kind, parameters=parameters), 1e-5)


@pytest.mark.parametrize("case", ["GPT-2", "no mask"], indirect=True)
def test_batches_memory_and_shards_do_not_matter(case, tmp_path, small_windows, capsys):
    shards = [case.features(f"shard-{i}", shard=i, n_shards=4) for i in (1, 2, 3, 4)]
    spec = features_spec(OUTPUT, PROJ_DIM)
    join_shards(features=tmp_path / "joined.h5", shards=shards, spec=spec, code="")
    settings = {"all": {}, "three": {"batch_size": 3}, "tight": {"memory_mb": 1}}
    others = [case.features(name, **changes) for name, changes in settings.items()]
    alone = case.features("alone", batch_size=1)
    for file in (*others, tmp_path / "joined.h5"):
        assert_same(file, alone)


def test_texts_that_the_user_padded_give_the_same(tmp_path):
    case = Case("GPT-2, masks", tmp_path)
    ragged = case.features("ragged")
    case.write("""
import torch

def padded(sample):
    missing = texts.POSITIONS - len(sample["labels"])
    return {name: torch.nn.functional.pad(x, (0, missing)) for name, x in sample.items()}

def train_data():
    return list(map(padded, texts.data(30, 0, ["attention_mask"])))
""")
    assert_same(case.features("padded"), ragged)


@pytest.mark.parametrize(("case", "batch_size"), [("GPT-2", 4), ("no mask", 64)], indirect=["case"])
def test_gramians_equal_autograd(case, batch_size):
    (expected, rows), (of_targets, columns) = case.gradients(), case.gradients("mine")
    gramian, outputs, ids = case.gramian("train", batch_size=batch_size)
    assert ids == (case.ids, case.ids)
    assert_close(gramian, rows @ rows.T, 1e-5)
    assert_close(outputs, expected, 1e-5)
    gramian, outputs, ids = case.gramian("mine", batch_size=batch_size)
    assert ids == (case.ids, [5, 2, 0, 6])
    assert_close(gramian, rows @ columns[[5, 2, 0, 6]].T, 1e-5)
    assert_close(outputs, of_targets[[5, 2, 0, 6]], 1e-5)


def test_embeddings_are_means_over_a_text_s_own_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("trak_core.stages.compute_outputs._WINDOW", 7)
    case = Case("Llama", tmp_path)
    settings = case.common(batch_size=4)
    del settings["memory_mb"]
    spec = replace(features_spec(OUTPUT, PROJ_DIM, split="all"), projection={"kind": "embedding"})
    compute_embeddings(embeddings=tmp_path / "e.h5", spec=spec, **settings)
    for key, split in (("train", "train"), ("targets", "mine")):
        found = pd.read_hdf(tmp_path / "e.h5", key).to_numpy()
        for row, sample in zip(found, case.samples(split), strict=True):
            with torch.no_grad():
                hidden = case.model.model(sample["input_ids"][None]).last_hidden_state[0]
            assert_close(row, hidden.mean(0).numpy(), 1e-5)


def test_memory_is_that_of_the_longest_in_a_batch(case, monkeypatch, capsys):
    """More short texts than long ones are in a batch."""
    shapes, real = [], write_features.LoadedModel.checked

    def watched(self, samples, start, stop, n_classes):
        batch = real(self, samples, start, stop, n_classes)
        if len(batch) > 1:
            shapes.append(tuple(batch.labels.shape))
        return batch

    monkeypatch.setattr(write_features.LoadedModel, "checked", watched)
    case.features("tight", memory_mb=1)
    out = capsys.readouterr().out
    (of_longest,) = map(int, re.findall(r"^(\d+) samples at once", out, flags=re.M))
    assert shapes[0] == (of_longest, 30)
    assert all(n * length <= 1.5 * of_longest * 30 for n, length in shapes)
    assert max(n for n, _ in shapes) > of_longest


def test_a_text_that_memory_does_not_hold_is_named(case):
    with pytest.raises(InputError, match=r"memory_mb must .* text-2 is a text of 30 tokens"):
        case.features("none", memory_mb=0)


@pytest.mark.parametrize(
    ("i", "change", "expected"),
    [
        (11, "x[:3].repeat(11)", r"(?s)IndexError.* text-11 is a text of 33 tokens"),
        (4, "x[:1]", r"text-4 has no such entry"),
    ],
    ids=["longer than the positions", "one token"],
)
def test_a_text_that_no_job_can_take_is_named(i, change, expected, case):
    case.write(f"""
def train_data():
    samples = texts.data(30, 0)
    samples[{i}] = {{name: {change} for name, x in samples[{i}].items()}}
    return samples
""")
    for job in (case.preflight, lambda: case.features("none"), lambda: case.gramian("train")):
        with pytest.raises(InputError, match=expected):
            job()


@pytest.mark.parametrize("split", ["train", "mine"])
def test_a_model_whose_tokens_see_padding_is_refused(split, tmp_path):
    case = Case("looks_ahead", tmp_path)
    for job in (case.features, lambda *_, **__: case.gramian(split)):
        with refused("gradients.padding", re.compile(r"up to [\d.e-]+")):
            job("none", split=split)


@pytest.mark.parametrize("case", ["Llama", "GPT-2", "no mask"], indirect=True)
def test_features_from_logits_in_pieces_are_the_same(case, capsys, monkeypatch):
    expected = case.features("whole", "tensor_sketch")
    assert "logits" not in capsys.readouterr().out
    # The logits of 30 tokens are more than a 2^18th of 500 MiB.
    monkeypatch.setattr(loaded_model, "_LOGITS_SHARE", 2**18)
    monkeypatch.setattr(gradient_terms, "max_piece_entries", lambda _: 5 * 40)
    file = case.features("pieces", "tensor_sketch")
    assert "30 x 40 logits" in capsys.readouterr().out
    assert_same(file, expected)


def test_outputs_in_small_batches_and_pieces_are_the_same(case, capsys, monkeypatch):
    spec = features_spec(OUTPUT, PROJ_DIM, kind="none", split="all", targets=None)

    def computed(name):
        file = case.folder / f"{name}.h5"
        compute_outputs(outputs=file, spec=spec, **case.common())
        with open_artifact(file, OUTPUTS) as artifact:
            return [artifact.vector(key) for key in ("labels", "outputs", "predictions")]

    whole = computed("all")
    assert "logits" not in capsys.readouterr().out
    called, call = [], outputs_stage.call
    with monkeypatch.context() as small:
        small.setattr(loaded_model, "_LOGITS_SHARE", 2**18)
        small.setattr(gradient_terms, "max_piece_entries", lambda _: 5 * 40)
        small.setattr(outputs_stage, "budget_bytes", lambda *memory: 1)
        small.setattr(outputs_stage, "call", lambda m, b: called.append(len(b)) or call(m, b))
        pieces = computed("few")
    assert "40 logits" in capsys.readouterr().out
    assert called == [1] * len(whole[0])
    for values, expected in zip(pieces, whole, strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-5)
