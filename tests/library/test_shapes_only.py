"""Models of fake tensors have the names, shapes and classes of the real ones."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from trak_core.config.preflight import _is_large
from trak_core.errors import InputError
from trak_core.gradients import as_batch, n_params, select_parameters
from trak_core.model_outputs.about_outputs import TABLE
from trak_core.stages.preflight_study import StudyModel
from trak_core.study.load_checkpoint import check_checkpoint
from trak_core.study.study import Study

lora = pytest.importorskip("lora_models", reason="with the extra `test`, as `make test` has it")
texts = pytest.importorskip("texts")
TEXT = "language_modelling"
READS_NUMBERS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        {init}

    def forward(self, x):
        {forward}
        return self.layer(x)

def make_model():
    return Model()
"""


def has_numbers(model):
    return not any(isinstance(p, FakeTensor) for p in model.module.parameters())


def both(tmp_path, code, output):
    (tmp_path / "study.py").write_text(code)
    study = Study.load(tmp_path / "study.py")
    models = [StudyModel(study, output, without_numbers=without) for without in (False, True)]
    assert has_numbers(models[0])
    return models


@pytest.mark.parametrize("make", ["texts.gpt2()", "lora.llama(tied=True)"])
def test_names_shapes_and_classes_are_the_model_s(make, tmp_path):
    code = f"import texts, lora_models as lora\n\ndef make_model():\n    return {make}\n"
    real, bare = both(tmp_path, code, TEXT)
    output = TABLE[TEXT].load()
    ids = torch.arange(6)[None]
    sample = as_batch({"input_ids": ids, "attention_mask": ids > 0, "labels": ids}, output)
    assert bare.count_classes(output, sample) == real.count_classes(output, sample)
    assert not has_numbers(bare)
    chosen = [select_parameters(model.module, None) for model in (real, bare)]
    assert [(k, p.shape) for k, p in chosen[0].items()] == [
        (k, p.shape) for k, p in chosen[1].items()
    ]
    # Tied weights are stored once. Another missing key is an error.
    state = real.module.state_dict()
    if "tied" in make:
        del state["lm_head.weight"]
    torch.save(state, tmp_path / "fits.pt")
    del state[next(key for key in state if "norm" in key or "ln_f" in key)]
    torch.save(state, tmp_path / "lacks.pt")
    for model in (real, bare):
        check_checkpoint(model.module, tmp_path / "fits.pt")
        with pytest.raises(InputError, match="missing from the checkpoint: "):
            check_checkpoint(model.module, tmp_path / "lacks.pt")


@pytest.mark.parametrize("around", ["{}", "lora.adapted({})"])
def test_a_base_that_is_read(around, tmp_path):
    """Models of transformers' from_pretrained and of PEFT are built with numbers."""
    lora.save(lora.llama(), tmp_path / "base")
    folder = lora.save(lora.adapted(lora.llama()), tmp_path / "adapter")
    made = around.format(f"AutoModelForCausalLM.from_pretrained({str(tmp_path / 'base')!r})")
    code = f"""
import lora_models as lora
from transformers import AutoModelForCausalLM

def make_model():
    return {made}
"""
    real, bare = both(tmp_path, code, TEXT)
    assert has_numbers(bare)
    sizes = [n_params(select_parameters(model.module, None)) for model in (real, bare)]
    assert sizes[0] == sizes[1]
    check_checkpoint(bare.module, folder if "adapted" in around else tmp_path / "base")
    assert _is_large(folder)


@pytest.mark.parametrize(
    ("init", "forward"),
    [("self.scale = float(torch.ones(1))", ""), ("", "assert x.sum().item() < 1e9")],
    ids=["make_model", "forward"],
)
def test_a_model_that_reads_numbers_gets_them(init, forward, tmp_path):
    code = READS_NUMBERS.format(init=init or "pass", forward=forward or "pass")
    _, bare = both(tmp_path, code, "image_classification")
    output = TABLE["image_classification"].load()
    sample = as_batch((torch.randn(1, 3), torch.tensor([1])), output)
    assert bare.count_classes(output, sample) == 2
    assert has_numbers(bare)
