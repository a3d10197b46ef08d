"""Folders of PEFT's adapters as checkpoints, beside what peft itself makes of them."""

import json
import re
import shutil
import sys

import pytest
import torch
from refused import refused
from safetensors.torch import load_file, save_file
from stored_weights import read_state_dict

from trak_core.gradients import formed_gradients, gradient_method, select_parameters
from trak_core.gradients.gradient_methods import gradients_at_once, gradients_one_by_one
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.study.load_checkpoint import load_checkpoint

peft = pytest.importorskip("peft", reason="with the extra `test`, as `make test` has it")
lora = pytest.importorskip("lora_models")

LLAMA = ("q_proj", "v_proj")


def on_llama(**settings):
    return lora.llama, peft.LoraConfig, {"target_modules": LLAMA, **settings}


def on_gpt2(**settings):
    settings |= {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    return lora.gpt2, peft.LoraConfig, settings


# A base, a kind of config and its settings: what peft stores in ways of its own.
KINDS = {
    "LoRA": on_llama(),
    "all linear layers": on_llama(target_modules="all-linear"),
    "peft's own choice of layers": (lora.llama, peft.LoraConfig, {}),
    "GPT-2": on_gpt2(),
    "ranks and alphas by layer": on_llama(rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}),
    "DoRA, rsLoRA": on_llama(use_dora=True, use_rslora=True),
    "PiSSA": on_llama(init_lora_weights="pissa"),
    "whole modules": on_llama(modules_to_save=["lm_head", "embed_tokens"]),
    "embeddings": on_llama(target_modules=[*LLAMA, "embed_tokens"]),
    "some tokens": on_llama(trainable_token_indices=[3, 5]),
    "biases": on_gpt2(bias="all"),
    "IA3": (
        lora.llama,
        peft.IA3Config,
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
}


def logits(model):
    with torch.no_grad():
        return model(input_ids=lora.texts(5)).logits


def assert_loads(model, folder, expected=None):
    """Load a folder, and compare with what peft makes of it."""
    expected = logits(lora.loaded(lora.llama(), folder)) if expected is None else expected
    load_checkpoint(model, folder)
    assert not model.training
    assert torch.equal(logits(model), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A LoRA adapter of a Llama, trained and saved."""
    return lora.save(lora.train(lora.adapted(lora.llama())), tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def folder(saved, tmp_path):
    """The same, to be spoilt."""
    return shutil.copytree(saved, tmp_path / "adapter")


# Those whose keys have the adapter's name in a place of their own.
NAMED = ("LoRA", "DoRA, rsLoRA", "whole modules", "embeddings", "some tokens", "IA3")


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "default") for kind in KINDS), *((kind, "mine") for kind in NAMED)]
)
def test_an_adapter_is_what_peft_makes_of_it(kind, name, tmp_path):
    base, config, settings = KINDS[kind]
    trained = lora.train(lora.adapted(base(), config(**settings), name))
    # peft saves an adapter of another name in a folder of that name.
    lora.save(trained, tmp_path)
    folder = tmp_path if name == "default" else tmp_path / name
    expected = logits(lora.loaded(base(), folder))
    assert torch.equal(expected, logits(trained))
    for model in (
        lora.adapted(base(), config(**settings)),
        lora.adapted(base(), config(**settings), "other"),
        lora.loaded(base(), folder, adapter_name="third"),
    ):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1)  # nothing is right by chance
        assert_loads(model, folder, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_gives_the_gradients_of_every_kind(kind):
    base, config, settings = KINDS[kind]
    model = lora.train(lora.adapted(base(), config(**settings)))
    parameters, output = select_parameters(model, None), TABLE["language_modelling"].load()
    ids = lora.texts(6)
    batch = {"input_ids": ids, "labels": ids}
    assert gradient_method(model, parameters, output, batch) is gradients_at_once
    found, expected = (
        formed_gradients(method, model, parameters, output, batch).gradients
        for method in (gradients_at_once, gradients_one_by_one)
    )
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-5)


def test_of_two_adapters_the_active_one_is_loaded(saved):
    model = lora.adapted(lora.llama())
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=LLAMA))
    model.set_adapter("other")
    before = {k: v.clone() for k, v in model.state_dict().items() if ".default." in k}
    assert_loads(model, saved)
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())


def test_a_resized_vocabulary_comes_with_its_embeddings(tmp_path):
    def base():
        model = lora.llama()
        model.resize_token_embeddings(lora.VOCABULARY + 2, mean_resizing=False)
        return model

    trained = lora.train(lora.adapted(base()))
    trained.get_input_embeddings().weight.data.add_(1)  # in the folder, not in the base
    lora.save(trained, tmp_path, save_embedding_layers=True)
    assert_loads(lora.adapted(base()), tmp_path, logits(trained))
    misfit = re.compile(
        r"of another shape: \S*embed_tokens\.weight \(22, 16\) for \(20, 16\).*\d\)"
    )
    with refused("study.adapter_settings", misfit):
        load_checkpoint(lora.adapted(lora.llama()), tmp_path)


def test_a_pickled_adapter_and_one_in_half_precision(saved, folder):
    model, expected = lora.adapted(lora.llama()), logits(lora.loaded(lora.llama(), saved))
    state = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(state, folder / "adapter_model.bin")
    assert_loads(model, folder, expected)
    (folder / "adapter_model.bin").unlink()
    save_file({k: v.bfloat16() for k, v in state.items()}, folder / "adapter_model.safetensors")
    assert_loads(model, folder)


def test_settings_that_decide_no_numbers_may_differ(saved):
    modules = r".*self_attn\.[qv]_proj"
    others = {"lora_dropout": 0.5, "init_lora_weights": "gaussian"}
    config = peft.LoraConfig(r=4, target_modules=modules, **others)
    assert_loads(lora.adapted(lora.llama(), config), saved)


OTHER, LACKS = "in settings: ", r"missing from the checkpoint: \S*"


@pytest.mark.parametrize(
    ("settings", "misfits"),
    [
        ({"lora_alpha": 16}, f"{OTHER}lora_alpha 8 for 16"),
        ({"alpha_pattern": {"q_proj": 1}}, OTHER + r"alpha_pattern \{\} for \{'q_proj': 1"),
        (
            {"init_lora_weights": "pissa"},
            f"{OTHER}init_lora_weights 'the base is kept' for 'pissa'",
        ),
        ({"r": 2}, r"of another shape: \S*q_proj\.A\.weight \(4, 16\) for \(2, 16\).* r 4 for 2"),
        (
            {"target_modules": ["q_proj"]},
            rf"unknown to the model: \S*v_proj\.A\.weight.*; {OTHER}target_.*\]",
        ),
        ({"use_dora": True}, f"{LACKS}lora_magnitude_vector.*use_dora False for True"),
        ({"modules_to_save": ["lm_head"]}, rf"{LACKS}lm_head\.weight.*\]"),
    ],
)
def test_settings_that_decide_numbers_must_be_those_of_the_training(saved, settings, misfits):
    config = peft.LoraConfig(**{"r": 4, "target_modules": LLAMA, **settings})
    pattern = re.compile(misfits.replace(r"\.A", r"\.lora_A"))
    with refused("study.adapter_settings", saved, pattern):
        load_checkpoint(lora.adapted(lora.llama(), config), saved)


def edit(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_settings_that_this_version_of_peft_does_not_know(folder):
    edit(folder, use_tomorrow=False, tomorrow_config=None)
    load_checkpoint(lora.adapted(lora.llama()), folder)
    edit(folder, use_tomorrow=True)
    with refused("study.adapter_settings", "use_tomorrow True"):
        load_checkpoint(lora.adapted(lora.llama()), folder)


def test_settings_that_an_older_version_of_peft_did_not_save(folder):
    path = folder / "adapter_config.json"
    old = ("peft_type", "r", "lora_alpha", "target_modules", "bias", "inference_mode")
    path.write_text(json.dumps({key: json.loads(path.read_text())[key] for key in old}))
    assert_loads(lora.adapted(lora.llama()), folder)


def cut(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def gone(name):
    return lambda folder: (folder / name).unlink()


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def with_state(change):
    def spoil(folder):
        state = load_file(folder / WEIGHTS)
        change(state, min(state))
        save_file(state, folder / WEIGHTS)

    return spoil


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SPOILT = {
    "no weights": (gone(WEIGHTS), "no_weights", f"README.md, {CONFIG}"),
    "a whole model beside it": (
        written("model.safetensors", ""),
        "no_weights",
        re.compile(r"README\.md, adapter_config\.json.*, model\.safetensors(?=\. )"),
    ),
    "no JSON": (written(CONFIG, "{"), "adapter_config", re.compile(r"Expecting .*\)")),
    "settings of no meaning": (
        lambda folder: edit(folder, layers_pattern="a"),
        "adapter_config",
        "layers_to_transform",
    ),
    "a cut file": (cut, "tensor_file", WEIGHTS),
    "a weight missing": (
        with_state(lambda state, key: state.pop(key)),
        "adapter_settings",
        re.compile(LACKS + r"layers\.0\.self_attn\.q_proj\.lora_A\.weight"),
    ),
    "a weight too many": (
        with_state(lambda state, key: state.update(other=torch.zeros(1))),
        "adapter_settings",
        "unknown to the model: other",
    ),
    "NaN": (
        with_state(lambda state, key: state[key].fill_(float("nan"))),
        "checkpoint_finite",
        re.compile(r"\S*lora_A\S*(?=\. )"),
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_folder_is_refused(folder, name):
    spoil, code, value = SPOILT[name]
    spoil(folder)
    with refused(f"study.{code}", value):
        load_checkpoint(lora.adapted(lora.llama()), folder)


def test_models_that_an_adapter_is_not_for_and_weights_without_its_folder(saved):
    with refused("study.adapter_model", "LlamaForCausalLM"):
        load_checkpoint(lora.llama(), saved)
    model = lora.adapted(lora.llama())
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=LLAMA))
    model.base_model.set_adapter(["default", "other"])
    with refused("study.adapter_active", "default, other"):
        load_checkpoint(model, saved)
    of_ia3 = lora.adapted(
        lora.llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with refused("study.adapter_config", "adapter_config.json", "LORA", "IA3"):
        load_checkpoint(of_ia3, saved)
    with refused("study.adapter_folder", "adapter_model.safetensors"):
        load_checkpoint(lora.adapted(lora.llama()), saved / "adapter_model.safetensors")


def test_without_peft_it_is_named(saved, monkeypatch):
    monkeypatch.delitem(sys.modules, "peft")
    with refused("study.adapter_model", saved, "peft"):
        load_checkpoint(torch.nn.Linear(1, 1), saved)


def test_the_digest_covers_weights_and_settings_and_the_model_beneath(folder):
    def digests(base):
        return load_checkpoint(lora.adapted(base), folder)

    first, other = digests(lora.llama()), lora.llama()
    assert first == digests(lora.llama())
    assert first["sha256"] == read_state_dict(folder)[1]
    (folder / "README.md").write_text("other words")
    assert first["sha256"] == read_state_dict(folder)[1]
    other.lm_head.weight.data[0, 0] += 1
    assert digests(other)["sha256"] == first["sha256"]
    assert digests(other)["model_sha256"] != first["model_sha256"]
    edit(folder, lora_dropout=0.5)
    assert read_state_dict(folder)[1] != first["sha256"]
    with_state(lambda state, key: state[key].mul_(2))(folder)
    assert digests(lora.llama())["model_sha256"] != first["model_sha256"]
