"""Gradients of many architectures, beside autograd of two copies in float64: which way they take.

    python benchmarks/architectures.py [NAME ...]

Models of transformers, timm and torchvision, from small configurations with random weights; what is
not installed is skipped with the reason. Each model goes through the checks of a job, and then
through the method that they choose, three samples together and one alone. The error is that of a
sample's whole gradient, relative to its norm, the largest of the samples. The truth calls the model
in float64 with a sample and its copy, never with a sample alone. Prints a Markdown table.
"""

import argparse
import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from machine import environment
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.gradients import (
    Batch,
    as_batch,
    check_samples_apart,
    choose_method,
    formed_gradients,
    select_parameters,
)
from trak_core.model_outputs.table import TABLE

VOCABULARY, CLASSES = 64, 5
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SOURCE = {"vocab_size": VOCABULARY, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5 = {**SOURCE, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART = {**SOURCE, **HEADS, "encoder_layers": 1, "decoder_layers": 1}
IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
VIT = {**{k: v for k, v in SIZE.items() if k.startswith(("hidden", "inter", "num_h"))}, **IMAGES}
VIT["num_attention_heads"] = 4
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_TRANSFORMERS = {
    "AutoModelForCausalLM": {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "olmo2", "phi3"), SIZE),
        **dict.fromkeys(("gpt_neox", "stablelm", "granite", "bloom"), SIZE),
        "gpt2": GPT2,
        "mixtral": SIZE | EXPERTS,
        "opt": SIZE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        "mamba": SIZE | {"state_size": 8},
    },
    "AutoModelForMaskedLM": dict.fromkeys(("bert", "roberta", "electra"), SIZE),
    "AutoModelForSequenceClassification": dict.fromkeys(("deberta-v2", "xlm-roberta"), SIZE),
    "AutoModelForSeq2SeqLM": {"t5": T5, "bart": BART},
    "AutoModelForImageClassification": {"vit": VIT, "resnet": {"num_labels": CLASSES}},
}
OUTPUTS = {
    "AutoModelForCausalLM": "language_modelling",
    "AutoModelForMaskedLM": "masked_language_modelling",
    "AutoModelForSequenceClassification": "text_classification",
    "AutoModelForSeq2SeqLM": "sequence_to_sequence",
}
OF_TIMM = (
    "resnet10t",
    "levit_128s",
    "efficientformer_l1",
    "poolformer_s12",
    "mobilenetv3_small_050",
)
OF_TORCHVISION = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1")


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and what samples it takes."""

    make: Callable[[], nn.Module]
    output: str
    image_size: int = 64

    def samples(self) -> dict[str, Tensor] | tuple[Tensor, Tensor]:
        """Return three samples."""
        classes = torch.tensor([0, 1, 1])
        if self.output == "image_classification":
            return torch.randn(3, 3, self.image_size, self.image_size), classes
        tokens = torch.randint(2, VOCABULARY, (3, 8))
        labels = classes if self.output == "text_classification" else tokens
        return {"input_ids": tokens, "labels": labels}


def _of_transformers(factory: str, kind: str, settings: dict[str, int]) -> nn.Module:
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(kind, **settings)
    return getattr(transformers, factory).from_config(config)


def _of_timm(name: str) -> nn.Module:
    return importlib.import_module("timm").create_model(name, num_classes=CLASSES)


def _of_torchvision(name: str) -> nn.Module:
    models = importlib.import_module("torchvision").models
    return getattr(models, name)(num_classes=CLASSES)


def cases() -> dict[str, Case]:
    """Return all cases by name."""
    found: dict[str, Case] = {}
    for factory, kinds in OF_TRANSFORMERS.items():
        output = OUTPUTS.get(factory, "image_classification")
        for kind, settings in kinds.items():
            make = partial(_of_transformers, factory, kind, settings)
            size = settings.get("image_size", 64)
            found[f"transformers {kind}"] = Case(make, output, size)
    for name in OF_TIMM:
        size = 224 if name.startswith(("levit", "efficientformer")) else 64
        found[f"timm {name}"] = Case(partial(_of_timm, name), "image_classification", size)
    for name in OF_TORCHVISION:
        make = partial(_of_torchvision, name)
        found[f"torchvision {name}"] = Case(make, "image_classification")
    return found


def _truth(model: nn.Module, output_name: str, batch: Batch, i: int) -> Tensor:
    """Return the gradient of sample i's f, beside a copy of itself; in float64 if it can be."""
    pair = batch.rows(torch.tensor([i, i]))
    try:
        doubled = pair.mapped(lambda t: t.double() if t.is_floating_point() else t)
        return _gradient(copy.deepcopy(model).double(), output_name, doubled)
    except RuntimeError:  # of experts, whose products take no float64
        return _gradient(model, output_name, pair).double()


def _gradient(model: nn.Module, output_name: str, pair: Batch) -> Tensor:
    output = TABLE[output_name].load()
    parameters = [p for p in model.parameters() if p.requires_grad]
    f = output.value(output.read(pair.given_to(model))[0], pair.labels[0])
    gradients = torch.autograd.grad(f, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def row(case: Case) -> tuple[str, ...]:
    """Return the way that a model takes, its errors together and alone, and what was said."""
    torch.manual_seed(0)
    try:
        model = case.make()
    except (ImportError, RuntimeError) as error:
        return "skipped", "", "", f"{type(error).__name__}: {str(error).splitlines()[0]}"
    output = TABLE[case.output].load()
    batch = as_batch(case.samples(), output)
    with torch.no_grad():
        model.train()
        batch.given_to(model)  # statistics of BatchNorm that aren't 0 and 1
    model.eval()
    parameters = select_parameters(model, None)
    try:
        check_samples_apart(model, output, batch)
    except InputError as error:
        return "refused", "", "", str(error)
    method, notice = choose_method(model, parameters, output, batch)
    truth = [_truth(model, case.output, batch, i) for i in range(len(batch))]

    def error_of(rows: slice) -> str:
        some = batch.rows(rows)
        formed = formed_gradients(method, model, parameters, output, some).gradients.values()
        found = torch.cat([g.flatten(1) for g in formed], dim=1).double()
        pairs = zip(found, truth[rows], strict=True)
        return f"{max(float((a - b).norm() / b.norm()) for a, b in pairs):.0e}"

    way = method.__name__.removeprefix("gradients_").replace("_", " ")
    said = "" if notice is None else notice.split("; it ")[-1].split(". ")[0]
    return way, error_of(slice(0, 3)), error_of(slice(1, 2)), said


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args().names
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    about = environment("cpu", ["torch", "transformers"])
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("\n| model | way | error of three | error alone | said |")
    print("|---|---|---|---|---|")
    for name, case in cases().items():
        if not chosen or name in chosen or name.split()[-1] in chosen:
            print(f"| {name} | {' | '.join(row(case))} |", flush=True)


if __name__ == "__main__":
    main()
