"""A LoRA fine-tune under Snakemake: adapters as PEFT saves them, on a base that lies elsewhere."""

import json
import shutil

import lora_models as lora
import numpy as np
import pytest
import torch
from oracle import projected
from safetensors.torch import load_file, save_file
from workspace import Workspace

from trak_core.artifacts import FEATURES, open_artifact

N_TRAIN, N_TARGETS, PROJ_DIM = 12, 3, 16
STUDY = f"""
import lora_models as lora
from peft import PeftModel
from transformers import LlamaForCausalLM

def samples(first, n):
    texts = lora.texts({N_TRAIN + N_TARGETS})[first : first + n]
    return [{{"input_ids": ids, "labels": ids}} for ids in texts]

def make_model():
    # Of an adapter loaded like this, all is frozen.
    return PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), "other")

def train_data():
    return samples(0, {N_TRAIN})

def target_data():
    return samples({N_TRAIN}, {N_TARGETS})
"""
CONFIG = {
    "model_output": "language_modelling",
    "checkpoints": {"run": "out", "other": "other"},
    "experiments": {"few": {"targets": [0, 2]}},
    "parameters": ["*lora_*"],
    "projection": {"proj_dim": PROJ_DIM},
}
FOLDERS = {"run-2": "out/checkpoint-2", "run-4": "out/checkpoint-4", "other": "other"}


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """Scored: a run with two checkpoints in a Trainer's folder, and one by itself."""
    study = Workspace.make(tmp_path_factory.mktemp("lora") / "study", "diabetes.py", {**CONFIG})
    study.path("study.py").write_text(STUDY)
    study.config["study"] = "study.py"
    for module in (lora, lora.small):
        shutil.copy2(module.__file__, study.path(f"{module.__name__}.py"))
    base = lora.llama()
    base.save_pretrained(study.path("base"), max_shard_size="4KB")
    assert study.path("base/model.safetensors.index.json").exists()
    model = lora.adapted(base)
    for steps in (2, 4):
        folder = lora.save(lora.train(model, steps=2), study.path(f"out/checkpoint-{steps}"))
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps}))
    lora.save(lora.train(lora.adapted(lora.llama()), seed=1), study.path("other"))
    assert study.run()["compute_features"] == 6
    return study


@pytest.fixture
def study(scored, tmp_path):
    return scored.copy(tmp_path / "study")


def expected(folder, checkpoint, ids):
    """Return projected gradients of log-odds by a loop, float64, on the model by peft itself."""
    model = lora.loaded(lora.llama(), folder, is_trainable=True).double()
    parameters = [p for name, p in model.named_parameters() if "lora_" in name]
    assert len(parameters) == 8
    rows = []
    for text in ids:
        logits = model(input_ids=text[None]).logits[0, :-1]
        log_p = logits.log_softmax(1).gather(1, text[1:, None]).sum()
        log_odds = log_p - torch.log1p(-log_p.exp())
        gradients = torch.autograd.grad(log_odds, parameters)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return projected(torch.stack(rows).numpy(), PROJ_DIM, checkpoint=checkpoint)


@pytest.mark.parametrize("checkpoint", FOLDERS)
def test_features_are_those_of_a_loop_over_the_model_by_peft(scored, checkpoint):
    ids = lora.texts(N_TRAIN + N_TARGETS)
    for split, chosen in (("train", ids[:N_TRAIN]), ("few", ids[[N_TRAIN, N_TRAIN + 2]])):
        wanted = expected(scored.path(FOLDERS[checkpoint]), checkpoint, chosen)
        path = scored.path(f"results/features/{checkpoint}/{split}.h5")
        with open_artifact(path, FEATURES) as file:
            found = file.matrix("features")[:]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * abs(wanted).max())


def test_features_on_another_base_are_never_taken_together(study):
    """Snakemake doesn't look at the base, unless `data_files` says so; the files do."""
    shard = min(study.path("base").glob("model-*.safetensors"))
    weights = {name: weight + 0.1 for name, weight in load_file(shard).items()}
    save_file(weights, shard, metadata={"format": "pt"})
    assert study.would_run() == {}
    study.config["experiments"] = {"few": {"targets": [1]}}
    output = study.fail("results/scores/few/other.h5")
    assert "model_sha256" in output
    assert "rule compute_features remakes it" in output
    study.config["data_files"] = ["base"]
    assert study.would_run()["compute_features"] == 6
    assert study.run("results/scores/few/other.h5")["compute_features"] == 2
