"""Scores of tokens and of layers sum to the scores."""

import pandas as pd
import pytest
import torch
from pipeline import run_stages, scores_spec, token_scores

from trak_core.artifacts import verify

pytest.importorskip("transformers")
STUDY = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

N = 14
drawn = torch.Generator().manual_seed(0)
sizes = torch.randint(3, 9, (N,), generator=drawn).tolist()
texts = [torch.randint(9, (size,), generator=drawn) for size in sizes]

size = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 9}
tokens = {"bos_token_id": None, "eos_token_id": None, "loss_type": "ForCausalLM"}
config = GPT2Config(**size, **tokens)

def make_model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)

def samples(chosen):
    return [{"input_ids": text, "labels": text} for text in chosen]

def train_data():
    return samples(texts[:10])

def train_ids():
    return [f"t{i}" for i in range(10)]

def target_data():
    return samples(texts[10:])
"""
TARGETS = [0, 2, 3]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A study of texts of different lengths, and two checkpoints."""
    folder = tmp_path_factory.mktemp("texts")
    study = folder / "texts_study.py"
    study.write_text(STUDY)
    scope = {}
    exec(STUDY, scope)
    paths = {}
    for seed in range(2):
        model = scope["make_model"]()
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        paths[f"c{seed}"] = folder / f"c{seed}.pt"
        torch.save(model.state_dict(), paths[f"c{seed}"])
    return study, paths, [text.tolist() for text in scope["texts"]]


SETTINGS = {
    "plain": {},
    "unit": {"combine": "unit_average", "power": 0.5, "runs": {"c0": ["c0"], "c1": ["c1"]}},
    "normalized": {"normalize": True, "combine": "average_of_products"},
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rademacher", "plain"), ("tensor_sketch", "unit"), ("hadamard", "normalized")],
)
def test_rows_add_up_to_the_scores(given, tmp_path, kind, name):
    study, checkpoints, texts = given
    given = {"model_output": "language_modelling", "damping": 0.5, "proj_dim": 16, "kind": kind}
    settings = given | SETTINGS[name]
    scores = run_stages(tmp_path, study, checkpoints, TARGETS, **settings)
    spec = scores_spec(checkpoints, TARGETS, **settings)
    path = token_scores(tmp_path, study, checkpoints, spec, batch_size=3)
    verify(path)
    top = pd.read_hdf(scores, "top_influences").set_index(["target_id", "train_id"])["score"]
    tokens, layers = (pd.read_hdf(path, key) for key in ("tokens", "layers"))
    bound = 1e-5 * top.abs().max()
    sides = [tokens[tokens.side == side] for side in ("train", "target")]
    for rows in (*sides, layers):
        sums = rows.groupby(["target_id", "train_id"])["score"].sum()
        assert set(sums.index) == set(top.index)
        assert (sums - top.loc[sums.index]).abs().max() < bound
    # A row for each token, and one for the part of no token.
    for rows, of in zip(sides, ("train", "target"), strict=True):
        for pair, mine in rows.groupby(["target_id", "train_id"]):
            text = texts[int(pair[1][1:])] if of == "train" else texts[10 + pair[0]]
            assert mine["token"].tolist() == [*range(len(text)), -1]
            # The model's output at the last token is not used.
            *scores, last, _ = mine["score"].abs()
            assert min(scores) > last == 0
    assert set(layers["layer"]) == {
        *("transformer.wte", "transformer.wpe", "transformer.ln_f"),
        *(f"transformer.h.0.{name}" for name in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj")),
        *(f"transformer.h.0.mlp.{name}" for name in ("c_fc", "c_proj")),
    }
    where = "target_id == 2 & train_id == 't3'"
    assert set(pd.read_hdf(path, "tokens", where=where)["train_id"]) <= {"t3"}


STOPPED = """

class Stopped(GPT2LMHeadModel):
    def forward(self, input_ids, **more):
        logits = super().forward(input_ids, **more).logits
        return {"logits": torch.where(input_ids[:, :1, None] == 8, logits.detach(), logits)}

for i, text in enumerate(texts):
    text[0] = 8 if i in (11, 12) else i % 8

def make_model():
    return Stopped(config)
"""


def test_targets_without_scores_are_left_out(given, tmp_path, monkeypatch):
    """Gradients of two targets are 0. Two others are taken instead."""
    monkeypatch.setattr("trak_core.stages.compute_token_scores._TARGETS", 2)
    targets = [1, 2, 0, 3]
    _, checkpoints, _ = given
    checkpoints = {"c0": checkpoints["c0"]}
    study = tmp_path / "texts_study.py"
    study.write_text(STUDY + STOPPED)
    settings = {"model_output": "language_modelling", "damping": 0.5, "proj_dim": 16}
    run_stages(tmp_path, study, checkpoints, targets, **settings)
    spec = scores_spec(checkpoints, targets, **settings)
    path = token_scores(tmp_path, study, checkpoints, spec, batch_size=3)
    assert set(pd.read_hdf(path, "tokens")["target_id"]) == {0, 3}
