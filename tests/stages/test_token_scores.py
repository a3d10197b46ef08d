"""Scores of tokens and of layers sum to the scores."""

import pandas as pd
import pytest
import torch
from linear_study import with_two_checkpoints
from pipeline import run_stages, scores_spec, token_scores

from trak_core.artifacts import verify

texts = pytest.importorskip("texts", reason="needs transformers, which `make test` has")
STUDY = texts.STUDY.format(make="gpt2", n_train=10, keys=())
TARGETS = [0, 2, 3]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A study of texts of different lengths, and two checkpoints."""
    folder = tmp_path_factory.mktemp("texts")
    study = folder / "texts_study.py"
    study.write_text(STUDY)
    paths = {}
    for seed in range(2):
        torch.manual_seed(seed)
        model = texts.gpt2()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        paths[f"c{seed}"] = folder / f"c{seed}.pt"
        torch.save(model.state_dict(), paths[f"c{seed}"])
    return study, paths


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
    study, checkpoints = given
    data = {"train": texts.data(10, 0), "target": texts.data(7, 1)}
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
    for rows, side in zip(sides, data, strict=True):
        for (target, train), mine in rows.groupby(["target_id", "train_id"]):
            number = int(train.removeprefix("text-")) if side == "train" else target
            n_tokens = len(data[side][number]["labels"])
            assert mine["token"].tolist() == [*range(n_tokens), -1]
            # The model's output at the last token is not used.
            *scores, last, _ = mine["score"].abs()
            assert min(scores) > last == 0
    in_block = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert set(layers["layer"]) == {
        *("transformer.wte", "transformer.wpe", "transformer.ln_f"),
        *(f"transformer.h.{i}.{name}" for i in range(2) for name in in_block),
    }
    where = "target_id == 2 & train_id == 'text-3'"
    assert set(pd.read_hdf(path, "tokens", where=where)["train_id"]) <= {"text-3"}


def test_targets_without_scores_are_left_out(tmp_path, monkeypatch):
    """Gradients of two targets are 0. Two others are taken instead."""
    monkeypatch.setattr("trak_core.stages.compute_token_scores._TARGETS", 2)
    study, checkpoints, _ = with_two_checkpoints(tmp_path)
    study.write_text(f"{study.read_text()}\nx[31:33] = 0\n")
    targets = [f"target-{i}" for i in (1, 2, 0, 3)]
    settings = {"model_output": "regression", "parameters": ["weight"]}
    run_stages(tmp_path, study, checkpoints, targets, **settings)
    path = token_scores(tmp_path, study, checkpoints, scores_spec(checkpoints, targets, **settings))
    assert set(pd.read_hdf(path, "tokens")["target_id"]) == {"target-0", "target-3"}
