"""Test on many architectures whether one backward pass for all samples gives correct gradients.

    python benchmarks/architectures.py --csv architectures.csv
    python benchmarks/architectures.py mixtral phi3 convnext_atto
    python benchmarks/architectures.py --device cuda

The models are tiny models of transformers, and models of timm and torchvision, if these packages
are installed. They have random weights, and no file is downloaded. For each model, the gradients of
four samples (two for large models) are computed by the method that jobs choose. The reference is
plain autograd in float64, on two copies of a sample at a time, because torch uses other kernels for
a batch of one.

The error is the largest difference, relative to the largest entry of the sample's gradient. If it
exceeds 1e-5, the comparison is repeated in float64, because a rounding error in float32 can change
the sign of a ReLU's input, which changes autograd's gradients too. The script prints a Markdown
table, and --csv writes a row for each model.
"""

import argparse
import contextlib
import copy
import importlib
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared import environment, write_csv
from torch import Tensor, nn

from trak_core.attribution.device import float32_precision
from trak_core.gradients import (
    Batch,
    GradientMethod,
    as_batch,
    formed_gradients,
    gradient_method,
    gradients_at_once,
    select_parameters,
)
from trak_core.model_outputs.language_modelling import LANGUAGE_MODELLING, SEQUENCE_TO_SEQUENCE
from trak_core.model_outputs.model_output import ModelOutput
from trak_core.model_outputs.supervised import CLASSIFICATION

N_SAMPLES, N_TOKENS, N_WORDS = 4, 11, 96
LARGE = 10_000_000  # parameters
# Names of models, by group: causal language models, encoder-decoders, classifiers of texts, of
# sounds and of images, and others.
NAMES: dict[str, list[str]] = {}
for _word in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").split():
    if _word.endswith(":"):
        NAMES[_word[:-1]] = []
    else:
        NAMES[list(NAMES)[-1]].append(_word)

BOXES = torch.library.Library("torchvision", "FRAGMENT")
FAMILIES = "writers", "translators", "readers", "listeners", "lookers"
# Names of settings differ between families. Only those that a configuration has are set.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_kv"), 24),
    **dict.fromkeys(("num_encoder_layers", "num_encoder_attention_heads"), 2),
    **{"num_decoder_attention_heads": 2, "decoder_start_token_id": 1},
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "hidden_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_inner"), 24),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_num_active_experts"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **{"num_key_value_heads": 2, "vocab_size": N_WORDS, "head_dim": 8, "rotary_dim": 4},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4},
    **{"v_head_dim": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"decoder_sparse_step": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "lru_width": 32, "state_size": 4},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    **{"expert_layer_offset": 1, "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8},
    **{"mamba_n_groups": 1, "use_mamba_kernels": False, "attention_window": 4, "block_size": 4},
    **{"n_shared_experts": 1, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    **{"hidden_size_per_head": 8, "image_size": 32, "patch_size": 8, "use_cache": False},
    **{"attention_window_size": 8, "word_embed_proj_dim": 32, "query_pre_attn_scalar": 8},
    **{"sliding_window": 4, "num_buckets": 8, "max_relative_positions": 8, "n_mlp_layers": 2},
    **{"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "conv_kernel": 3},
    **{"mamba_expand": 2, "expand": 2, "n_groups": 1, "chunk_size": 4, "time_step_rank": 2},
}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "deepseek_v2": {"head_dim": 4, "num_key_value_heads": 4},
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
        "num_mem_blocks": 1,
    },
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1]},
    "xlnet": {"d_inner": 48},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "convbert": {"head_ratio": 2},
    "funnel": {"block_sizes": [1, 1], "d_head": 8, "num_decoder_layers": 1},
    "big_bird": {"attention_type": "original_full"},
    "longformer": {"attention_window": [4, 4], "pad_token_id": 1},
    "convnext": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "patch_size": 4},
    "resnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8},
    "regnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 4},
    "swin": {
        **{"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "patch_size": 2,
    },
    "focalnet": {"embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "patch_size": 4},
}
OWN |= {"convnextv2": OWN["convnext"], "swinv2": OWN["swin"]}
_WAVES: dict[str, Any] = {
    **{"hidden_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4]},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "tdnn_dim": [16]},
    **{"num_feat_extract_layers": 2, "classifier_proj_size": 16, "tdnn_kernel": [3]},
    **{"tdnn_dilation": [1], "squeeze_factor": 2, "conv_depthwise_kernel_size": 3},
}
for _name in ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d"):
    OWN[_name] = _WAVES
OWN["data2vec-audio"] = _WAVES | {"conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}
OWN["wav2vec2-conformer"] = _WAVES
OWN["audio-spectrogram-transformer"] = {"max_length": 32, "num_mel_bins": 16, "patch_size": 8}
OWN["whisper"] = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20}
_TOWER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": N_WORDS},
    **{"num_attention_heads": 4, "projection_dim": 16, "image_size": 32, "patch_size": 8},
}
for _name in ("clip", "siglip"):
    OWN[_name] = {"vision_config": _TOWER, "text_config": _TOWER}
for _name in ("mobilevit", "poolformer", "pvt", "cvt", "segformer", "pvt_v2", "mobilevitv2"):
    OWN[_name] = {"num_attention_heads": None, "hidden_size": None, "image_size": 64}
OWN["mobilevitv2"] |= {"patch_size": 2}  # of a map of 4 x 4
OWN["bit"] = {"embedding_size": 32, "hidden_sizes": [256, 256, 256, 256], "depths": [1, 1, 1, 1]}


@dataclass(frozen=True)
class Case:
    """A model, its model output and a batch."""

    model: nn.Module
    output: ModelOutput
    batch: Batch


@dataclass(frozen=True)
class Row:
    """The result for one model.

    Attributes:
        way: "one pass", "one by one", "refused" or "not built".
        error: The largest difference from autograd, relative to the largest entry; NaN if there are
            no gradients.
        exact_error: The same error in float64 if ``error`` exceeds 1e-5, else NaN.
        reason: The message that explains ``way``.
    """

    package: str
    model: str
    parameters: int
    way: str
    error: float = math.nan
    exact_error: float = math.nan
    reason: str = ""


def of_transformers(name: str) -> Case:
    """Return a tiny model of a family, given the family's name in transformers."""
    import transformers

    known = transformers.AutoConfig.for_model(name).to_dict()
    own = OWN.get(name, {})
    settings = {
        key: value
        for key, value in ({k: v for k, v in SMALL.items() if k in known} | own).items()
        if value is not None
        if key in own or not isinstance(known[key], list)
    }
    if isinstance(known.get("layer_types"), list) and "layer_types" not in settings:
        settings["layer_types"] = known["layer_types"][: settings.get("num_hidden_layers", 2)]
    config = transformers.AutoConfig.for_model(name, **settings)
    config.num_labels = 3
    if name in NAMES["listeners"]:
        model = transformers.AutoModelForAudioClassification.from_config(config)
        return Case(model, CLASSIFICATION, as_batch(sounds(name), CLASSIFICATION))
    if name in NAMES["lookers"]:
        model = transformers.AutoModelForImageClassification.from_config(config)
        size = getattr(getattr(config, "vision_config", config), "image_size", None) or 32
        return images(model, size if isinstance(size, int) else size[0])
    ids = torch.randint(3, N_WORDS, (N_SAMPLES, N_TOKENS))
    if name in NAMES["readers"]:
        model = transformers.AutoModelForSequenceClassification.from_config(config)
        samples = {"input_ids": ids, "labels": torch.arange(N_SAMPLES) % 3}
        return Case(model, CLASSIFICATION, as_batch(samples, CLASSIFICATION))
    if name in NAMES["translators"]:
        config.decoder_start_token_id = 1
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        samples = {"input_ids": ids, "labels": ids.flip(1)[:, 3:]}
        return Case(model, SEQUENCE_TO_SEQUENCE, as_batch(samples, SEQUENCE_TO_SEQUENCE))
    model = transformers.AutoModelForCausalLM.from_config(config)
    samples = {"input_ids": ids, "labels": ids}
    return Case(model, LANGUAGE_MODELLING, as_batch(samples, LANGUAGE_MODELLING))


def sounds(name: str) -> dict[str, Tensor]:
    """Return random waves with labels, or spectra for models that take spectra."""
    labels = torch.arange(N_SAMPLES) % 3
    if name == "whisper":
        return {"input_features": torch.randn(N_SAMPLES, 16, 40), "labels": labels}
    shape = (32, 16) if name == "audio-spectrogram-transformer" else (2000,)
    return {"input_values": torch.randn(N_SAMPLES, *shape), "labels": labels}


def images(model: nn.Module, size: int) -> Case:
    """Return a classifier and random images, fewer images for a large model to save memory."""
    n_samples = 2 if sum(p.numel() for p in model.parameters()) > LARGE else N_SAMPLES
    samples = torch.randn(n_samples, 3, size, size), torch.arange(n_samples) % 3
    return Case(model, CLASSIFICATION, as_batch(samples, CLASSIFICATION))


def package_of_images(name: str) -> Any:
    """Import torchvision or timm, which the tests' environment lacks.

    With a CPU build of torch, torchvision's CUDA wheel cannot load its box operators, and its
    import fails unless two of them are declared. No classifier calls these operators, so they are
    declared here without an implementation.
    """
    try:
        return importlib.import_module(name)
    except RuntimeError:
        for operator in ("nms", "qnms"):
            BOXES.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module(name)


def of_timm(name: str) -> Case:
    """Return a timm model, for small images if the model supports them."""
    timm = package_of_images("timm")

    for settings, size in (({"img_size": 64}, 64), ({}, 64), ({}, 224), ({}, 256)):
        with contextlib.suppress(
            TypeError, AssertionError, RuntimeError, ValueError, AttributeError
        ):
            model = timm.create_model(name, num_classes=3, **settings).eval()
            with torch.no_grad():
                model(torch.randn(2, 3, size, size))
            return images(model, size)
    size = timm.create_model(name, num_classes=3).default_cfg["input_size"][-1]
    return images(timm.create_model(name, num_classes=3), size)


def of_torchvision(name: str) -> Case:
    """Return a model of torchvision."""
    torchvision = package_of_images("torchvision")

    size = {"inception_v3": 96, "maxvit_t": 224, "vit_b_32": 224, "alexnet": 96}.get(name, 64)
    extra = {"aux_logits": False} if name in {"googlenet", "inception_v3"} else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=3, **extra)
    return images(model, size)


def perturb(model: nn.Module) -> None:
    """Perturb every weight, because initial zeros and ones hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.02 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                mean: Any = module.running_mean
                if mean is not None:
                    mean.add_(0.1 * torch.randn_like(mean))


def in_float64(case: Case) -> Case:
    """Return the case with a copy of the model, all in float64."""
    model: Any = copy.deepcopy(case.model).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products do not support float64
    batch = case.batch.mapped(lambda x: x.double() if x.is_floating_point() else x)
    return Case(model, case.output, batch)


def truth(case: Case) -> list[Tensor]:
    """Return each sample's gradient by autograd, from two copies of the sample."""
    parameters = list(select_parameters(case.model, None).values())
    rows = []
    for i in range(len(case.batch)):
        twice = case.batch.rows(torch.tensor([i, i]))
        outputs = case.output.read(twice.given_to(case.model))
        f = torch.stack([case.output.value(x, twice.labels[0]) for x in outputs]).mean()
        # Some models cache tensors that they computed from their parameters.
        found = torch.autograd.grad(f, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return rows


def gradients_of(case: Case, method: GradientMethod) -> Tensor:
    """Return the gradients of all samples, shape (samples, entries)."""
    parameters = select_parameters(case.model, None)
    formed = formed_gradients(method, case.model, parameters, case.output, case.batch)
    return torch.cat([g.reshape(len(g), -1) for g in formed.gradients.values()], 1)


def worst(found: Tensor, expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the largest entry of the sample's gradient."""
    pairs = zip(found.double(), expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:150]


def judged(package: str, name: str, make: Callable[[str], Case], device: str) -> Row:
    """Build a model, compute its gradients, and compare them with autograd's."""
    torch.manual_seed(0)
    try:
        case = make(name)
        perturb(case.model.eval())
        batch = case.batch.mapped(lambda tensor: tensor.to(device))
        case = Case(case.model.to(device), case.output, batch)
        exact = in_float64(case)
        expected = truth(exact)
    except Exception as error:
        return Row(package, name, 0, "not built", reason=_in_short(error))
    parameters = select_parameters(case.model, None)
    size = sum(p.numel() for p in parameters.values())
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            method = gradient_method(case.model, parameters, case.output, case.batch)
            found = gradients_of(case, method)
        error = worst(found, expected)
        exact_error = worst(gradients_of(exact, method), expected) if error > 1e-5 else math.nan
    except Exception as error:
        return Row(package, name, size, "refused", reason=_in_short(error))
    way = "one pass" if method is gradients_at_once else "one by one"
    reason = said.getvalue().partition("; it ")[2].partition(". Gradients ")[0]
    return Row(package, name, size, way, error, exact_error, reason)


def rows_of(names: list[str], device: str) -> Iterator[Row]:
    """Yield the rows of the named models, or of all models if no name is given."""
    for package, known, make in (
        ("transformers", [name for group in FAMILIES for name in NAMES[group]], of_transformers),
        ("timm", NAMES["timm"], of_timm),
        ("torchvision", NAMES["torchvision"], of_torchvision),
    ):
        for name in known:
            if not names or name in names or package in names:
                yield judged(package, name, make, device)


def main() -> None:
    """Print a row for each model, then the number of models for each method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("models", nargs="*", help="names of models or of packages; all if none")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    with float32_precision("highest"):
        for row in rows_of(arguments.models, arguments.device):
            rows.append(row)
            errors = f"{row.error:.0e} ({row.exact_error:.0e} in float64)"
            line = f"{row.package} {row.model}: {row.way}, {errors}; {row.reason}"
            print(line.replace("\n", " "), file=sys.stderr, flush=True)
    ways = "one pass", "one by one", "refused", "not built"
    print(f"| package | {' | '.join(ways)} | worst error | in float64 |")
    print(f"|{'---|' * (len(ways) + 3)}")
    for package in dict.fromkeys(row.package for row in rows):
        own = [row for row in rows if row.package == package]
        counts = [sum(row.way == way for row in own) for way in ways]
        rounded = [row for row in own if row.error > 1e-5]
        right = max((row.error for row in own if row.error <= 1e-5), default=math.nan)
        exact = max((row.exact_error for row in rounded), default=math.nan)
        errors = f"{right:.0e} | {f'{exact:.0e} ({len(rounded)} models)' if rounded else ''}"
        print(f"| {package} | {' | '.join(map(str, counts))} | {errors} |")
    if arguments.csv:
        write_csv(
            arguments.csv,
            rows,
            environment(arguments.device, ["torch", "transformers", "timm", "torchvision"]),
        )


if __name__ == "__main__":
    main()
