"""Load weights that transformers or PEFT stored under names that differ from those in the model.

The state dict of a model can change between releases of transformers. For example, layers are
renamed, the weights of experts are joined into one tensor, or masks are no longer stored. A file
can also have been saved from the model without its head. ``convert_weights`` lets transformers
convert the weights in such files.

``PeftModel.save_pretrained`` writes the weights and the settings of an adapter. With another
setting, such as another ``lora_alpha``, the same weights give different outputs. Therefore,
``Adapter`` compares the settings with those of the model. peft is imported only for adapters.
"""

import json
import logging
import re
import sys
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.settings import ADAPTER_CONFIG

# Keys of a model's config.json that do not change the model's outputs in evaluation mode.
_WITHOUT_EFFECT = re.compile(
    r"^_|drop|_token_id$|^(architectures|(torch_)?dtype|problem_type|transformers_version|use_cache)$"
)


def config_notice(model: nn.Module, folder: Path) -> str:
    """Return a notice if the ``config.json`` in a folder differs from the model's config, else "".

    Comparing the names and shapes of weights does not show every difference. For example, weights
    also fit a model with another number of attention heads.
    """
    library: Any = sys.modules.get("transformers")
    file = folder / "config.json"
    if library is None or not isinstance(model, library.PreTrainedModel) or not file.is_file():
        return ""
    config: Any = model.config
    try:
        stored = type(config).from_dict(json.loads(file.read_text(encoding="utf-8")))
    except Exception:  # transformers can raise any error if the config is for another model.
        return ""
    own, saved = config.to_dict(), stored.to_dict()
    differ = [
        f"{key} {saved[key]!r} instead of {own.get(key)!r}"
        for key in sorted(saved)
        if saved[key] != own.get(key) and not _WITHOUT_EFFECT.search(key)
    ]
    if not differ:
        return ""
    return (
        "config.json differs from the config of the model that make_model() returns. It has "
        f"{listed(differ)}. The model's config is used. If training used config.json, build the "
        "model from this folder."
    )


def convert_weights(
    model: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[str]]] | None:
    """Let transformers convert the weights in ``state`` to the names and shapes of ``model``.

    Returns:
        The converted state dict, and the keys that do not fit, by the kind of the difference. The
        weights have the model's widest dtype. If ``state`` is on the meta device, so are the
        converted weights. This needs the package accelerate. Without it, the model's own weights
        are returned, as if all keys fitted.

        None if the model is not from transformers, or if its class declares weights that may be
        missing, because transformers would initialize them without reporting it.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    model_class: Any = type(model)
    optional: Any = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    if any(re.search(key, name) for key in optional for name, _ in model.named_parameters()):
        return None
    without_numbers = any(value.is_meta for value in state.values())
    if without_numbers and find_spec("accelerate") is None:
        return model.state_dict(), {}
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # The caller reports keys that do not fit.
    try:
        with torch.random.fork_rng(devices=[]):
            converted, report = model_class.from_pretrained(
                None,
                config=deepcopy(model.config),
                state_dict=dict(state),
                dtype=max(floats, key=lambda dtype: dtype.itemsize),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **({"device_map": "meta"} if without_numbers else {}),
            )
    finally:
        logging.disable(disabled)
    misfits = {
        "missing from the checkpoint": sorted(report["missing_keys"]),
        "unknown to the model": sorted(report["unexpected_keys"]),
        "of another shape": [
            f"{key} {tuple(stored)} for {tuple(own)}"
            for key, stored, own in sorted(report["mismatched_keys"])
        ],
        "that cannot be converted": [" ".join(text.split()) for text in report["error_msgs"]],
    }
    return converted.state_dict(), {kind: keys for kind, keys in misfits.items() if keys}


# Settings in an adapter's config that record its origin or its training. They do not change the
# outputs of the trained adapter, so differences are ignored.
_TRAINING_SETTINGS = frozenset({
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *("megatron_config", "megatron_core"),
})
# Settings that determine which layers get adapters. Different settings can select the same layers,
# so differences are ignored if the names and shapes of the weights agree.
_LAYER_SETTINGS = frozenset({
    *("bias", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_modules", "target_parameters"),
})
# Initializations of an adapter that do not change the base model's weights. PiSSA and OLoRA do.
_INITS_KEEPING_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The active adapter of a PeftModel."""

    model: Any
    name: str

    @classmethod
    def active(cls, model: Any, folder: Path) -> Self:
        """Return the active adapter of a PeftModel. ``folder`` is named in error messages."""
        peft: Any = sys.modules.get("peft")  # If peft was not imported, there is no PeftModel.
        if peft is None or not isinstance(model, peft.PeftModel):
            raise InputError(
                f"{folder}: if the weights are those of an adapter, make_model() must return "
                f"a peft.PeftModel. Found {type(model).__name__}. Return "
                "`PeftModel.from_pretrained(base, folder)`, or `get_peft_model(base, config)` with "
                "the config that was used for training.",
                code="study.adapter_model",
            )
        active = model.active_adapters
        if len(active) != 1:
            raise InputError(
                f"{folder}: exactly one adapter must be active in the PeftModel that make_model() "
                f"returns. Found {', '.join(active) or 'none'} active among its adapters "
                f"{', '.join(model.peft_config)}. Call `model.set_adapter(name)` in make_model().",
                code="study.adapter_active",
            )
        return cls(model, active[0])

    def weights(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter's current weights in the model, under the names that peft saves.

        If training has changed the vocabulary, peft saves the base model's embeddings with the
        adapter. Therefore, the embeddings are included if ``stored`` contains them.
        """
        from peft import get_peft_model_state_dict

        state_dict = partial(get_peft_model_state_dict, self.model, adapter_name=self.name)
        own = state_dict(save_embedding_layers=False)
        if stored.keys() <= own.keys() or not hasattr(self.model, "get_input_embeddings"):
            return own
        more = state_dict(save_embedding_layers=True)
        return {key: value for key, value in more.items() if key in own or key in stored}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Load ``stored`` into the adapter, and check that the adapter then has these values."""
        from peft import set_peft_model_state_dict

        # The dict is copied, because some versions of peft rename its keys in place.
        set_peft_model_state_dict(self.model, dict(stored), adapter_name=self.name)
        own = self.weights(stored)
        lost = [k for k, v in stored.items() if not torch.equal(own[k].cpu(), v.to(own[k].dtype))]
        if lost:
            raise InputError(
                "After peft has loaded an adapter, the model must contain the adapter's weights. "
                f"Found other values in {listed(lost)}. Save the state_dict() of the whole model "
                "instead of the adapter.",
                code="study.adapter_model",
            )

    def differing_settings(self, folder: Path) -> tuple[list[str], list[str]]:
        """Compare the settings in an adapter's folder with those of the adapter in the model.

        Returns:
            Two lists that describe differences: those in settings that change the outputs, and
            those in settings that only select the layers with adapters.
        """
        own = self.model.peft_config[self.name]
        stored, config = _read_config(folder / ADAPTER_CONFIG, own)
        saved, mine = _plain(config), _plain(own.to_dict())
        of_outputs, of_layers = list[str](), list[str]()
        for key in sorted(saved.keys() - _TRAINING_SETTINGS):
            if saved[key] != mine[key]:
                texts = of_layers if key in _LAYER_SETTINGS else of_outputs
                texts.append(f"{key} {saved[key]!r} for {mine[key]!r}")
        known = mine.keys() | _TRAINING_SETTINGS | _LAYER_SETTINGS
        # A newer peft may have saved settings that this version does not know. They have no effect
        # if they are false or empty.
        of_outputs += [
            f"{key} {value!r}, which this version of peft does not know (install a newer one)"
            for key, value in stored.items()
            if value and key not in known
        ]
        return of_outputs, of_layers


def _read_config(path: Path, own: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an adapter's settings as the file contains them, and with peft's defaults added.

    ``own`` is the config of the adapter in the model, which must be of the same type.
    """
    from peft import PeftConfig

    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["peft_type"] != own.peft_type.value:
            raise ValueError(
                f"its `peft_type` is {stored['peft_type']}, but the model's adapter has the "
                f"`peft_type` {own.peft_type.value}. Create the model's adapter in make_model() "
                "with PeftConfig.from_pretrained(folder)"
            )
        with warnings.catch_warnings(action="ignore"):  # peft warns about unknown settings.
            return stored, PeftConfig.from_peft_type(**stored).to_dict()
    except (OSError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise InputError(
            f"{path}: an adapter's config must be JSON that peft can read, as "
            f"PeftModel.save_pretrained writes it. Reading it failed: {type(error).__name__}: "
            f"{error}. Save the adapter again, or install the version of peft that saved it.",
            code="study.adapter_config",
        ) from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings to JSON types, and sets to sorted lists, to compare them with ``==``."""

    def plain_value(value: Any) -> Any:
        return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)

    plain = json.loads(json.dumps(dict(settings), default=plain_value))
    for key, value in plain.items():
        if key.startswith("init_") and key.endswith("weights") and value in _INITS_KEEPING_BASE:
            plain[key] = "the base is kept"  # After training, they give the same outputs.
    return plain
