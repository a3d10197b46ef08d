"""Folders whose names or layout the class of their model no longer has, beside from_pretrained."""

import re

import pytest
import torch
from refused import refused
from stored_weights import read_state_dict, save

from trak_core.study.load_checkpoint import check_checkpoint, load_checkpoint

transformers = pytest.importorskip("transformers", reason="with the extra `test`")

SIZES = {
    **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
MOST_KINDS = {
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "llama": {"tie_word_embeddings": True},
    "gpt2": {},
}


def made(kind):
    settings = SIZES | MOST_KINDS[kind]
    config = transformers.AutoConfig.for_model(kind, **settings)
    return transformers.AutoModelForCausalLM.from_config(config)


def saved(kind, folder):
    """The oldest form of a folder: what a base without head saved, with what is computed now."""
    model = made(kind)
    if kind == "gpt2":
        model.transformer.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    state, _ = read_state_dict(folder)
    state = {key: value.clone() for key, value in state.items()}
    state |= {
        "gpt2": {"h.0.attn.bias": torch.ones(1, 1, 32, 32)},
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
        "gpt_neox": {"gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9)},
    }.get(kind, {})
    return state


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", ["model.safetensors", "a.pt"])
@pytest.mark.parametrize("kind", MOST_KINDS)
def test_weights_are_those_that_transformers_reads(kind, name, prefix, tmp_path, capsys):
    state = saved(kind, tmp_path)
    oracle = made(kind).from_pretrained(tmp_path)
    path = save({prefix + key: value for key, value in state.items()}, tmp_path / name)
    path = path if name == "a.pt" else tmp_path
    capsys.readouterr()
    model = made(kind)
    before = torch.get_rng_state()
    assert check_checkpoint(model, path)[0]
    digests = load_checkpoint(model, path)
    assert torch.equal(torch.get_rng_state(), before)
    assert digests == {"sha256": read_state_dict(path)[1]}
    own, expected = model.state_dict(), oracle.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], expected[key]) for key in own)
    buffers = dict(oracle.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert f"{path}: transformers converted the weights to the" in capsys.readouterr().out
    assert not model.training


@pytest.mark.parametrize("read", [check_checkpoint, load_checkpoint])
def test_what_misfits_is_said_in_the_names_of_the_model(read, tmp_path):
    state = saved("mixtral", tmp_path)
    state["other.weight"] = torch.ones(2)
    state["lm_head.weight"] = torch.ones(40, 15)
    del state["model.norm.weight"]
    save(state, tmp_path / "model.safetensors")
    expected = (
        "missing from the checkpoint: model.norm.weight; unknown to the model: other.weight; "
        "of another shape: lm_head.weight (40, 15) for (40, 16)"
    )
    with refused("study.checkpoint_keys", expected):
        read(made("mixtral"), tmp_path)


def test_a_model_keeps_its_own_dtype(tmp_path):
    state = saved("gpt_neox", tmp_path)
    load_checkpoint(model := made("gpt_neox").double(), tmp_path)
    assert torch.equal(model.lm_head.weight, state["embed_out.weight"].double())
    load_checkpoint(model := made("gpt_neox").bfloat16(), tmp_path)
    assert torch.equal(model.lm_head.weight, state["embed_out.weight"].bfloat16())


def test_weights_that_transformers_would_draw_are_missed(tmp_path):
    """Some classes name weights that a file need not have."""
    state = saved("gpt_neox", tmp_path)
    del state["gpt_neox.final_layer_norm.bias"]
    save(state, tmp_path / "model.safetensors")
    model = made("gpt_neox")
    model._keys_to_ignore_on_load_missing = ["final_layer_norm"]
    missing = re.compile(r"missing.*layer_norm.bias.*: embed_out.*bias")
    with refused("study.checkpoint_keys", missing):
        load_checkpoint(model, tmp_path)
