"""Fit weights that transformers or PEFT names to a model of theirs.

A folder may have names, or a layout, that the model's class no longer has: releases rename layers,
experts lie one by one in a file and together in the model, a base without its head has no prefix,
and old files hold masks and frequencies that are computed now. transformers knows them all.

A folder of ``PeftModel.save_pretrained`` holds the adapter's weights and, in its config, the
settings that say what they mean: the same numbers under another ``lora_alpha`` are another model.
peft itself names the weights and puts them in; only such a folder imports it.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trak_core.errors import InputError


def renamed(
    model: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[str]]] | None:
    """Return what transformers makes of a state for a model of its own, and what misfits, in words.

    Weights come in the model's widest dtype. Where ``state`` is on torch's meta device, they are
    too; without accelerate, which transformers does that with, they are the model's own. None for
    any other model, and for one whose weights transformers would draw without a word.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    made: Any = type(model)
    unsaid: Any = getattr(model, "_keys_to_ignore_on_load_missing", None)
    drawn = [re.compile(pattern) for pattern in unsaid or ()]
    if any(pattern.search(name) for pattern in drawn for name, _ in model.named_parameters()):
        return None
    without_numbers = any(value.is_meta for value in state.values())
    if without_numbers and find_spec("accelerate") is None:
        return model.state_dict(), {}
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # a report of what misfits, which the caller makes
    try:
        with torch.random.fork_rng(devices=[]):
            other, report = made.from_pretrained(
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
        "missing in the checkpoint": sorted(report["missing_keys"]),
        "unknown to the model": sorted(report["unexpected_keys"]),
        "of another shape": [
            f"{key} {tuple(stored)} for {tuple(own)}"
            for key, stored, own in sorted(report["mismatched_keys"])
        ],
        "not to be converted": [" ".join(text.split()) for text in report["error_msgs"]],
    }
    return other.state_dict(), {kind: keys for kind, keys in misfits.items() if keys}


# Settings that say where an adapter comes from and how it was trained. No number depends on them.
_TRAINING_SETTINGS = frozenset({
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("task_type", "lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *("megatron_config", "megatron_core"),
})
# Settings that determine which weights exist. Keys and shapes are compared instead, because there
# are many ways to write one choice of layers.
_LAYER_SETTINGS = frozenset({
    *("bias", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_bias"),
    *("modules_to_save", "rank_pattern", "target_modules", "target_parameters"),
})
# Initializations that leave the base's weights as they are; PiSSA, OLoRA and others change them.
_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")


@dataclass(frozen=True, slots=True)
class Adapter:
    """The active adapter of a PeftModel, with its name in it."""

    model: Any
    name: str

    @classmethod
    def of(cls, model: nn.Module, folder: Path) -> Self:
        """Return the adapter of ``model`` that a folder's weights are for: its only active one."""
        try:
            from peft import PeftModel
        except ImportError as error:
            raise InputError(
                f"{folder}: for an adapter's folder as a checkpoint, peft must be installed. "
                f"Importing it failed: {error}. `python -m pip install peft`, into the environment "
                "that jobs run in.",
                code="study.adapter_peft",
            ) from error
        if not isinstance(model, PeftModel):
            raise InputError(
                f"{folder}: for an adapter's folder as a checkpoint, make_model() must return a "
                f"peft.PeftModel: the base with its weights and the adapter's layers. Found "
                f"{type(model).__name__}. Return `PeftModel.from_pretrained(base, folder)`, or "
                "`get_peft_model(base, config)` with the config of the training.",
                code="study.adapter_model",
            )
        active = model.active_adapters
        if len(active) != 1:
            raise InputError(
                f"{folder}: one adapter must be active in the PeftModel that make_model() returns; "
                f"it gets the checkpoint's weights. Found {', '.join(active) or 'none'} of "
                f"{', '.join(model.peft_config)}. Call `model.set_adapter(name)`.",
                code="study.adapter_active",
            )
        return cls(model, active[0])

    def weights(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's own adapter weights, by the names that they are stored under.

        They have the base's embeddings if ``stored`` has: peft saves those of a longer vocabulary.
        """
        from peft import get_peft_model_state_dict

        own_under = partial(get_peft_model_state_dict, self.model, adapter_name=self.name)
        own = own_under(save_embedding_layers=False)
        if stored.keys() <= own.keys() or not hasattr(self.model, "get_input_embeddings"):
            return own
        more = own_under(save_embedding_layers=True)
        return {key: value for key, value in more.items() if key in own or key in stored}

    def put(self, stored: Mapping[str, Tensor]) -> None:
        """Put in weights with the keys and shapes of ``weights``; the same must come out again."""
        from peft import set_peft_model_state_dict

        # Some versions of peft rename the keys of what they are given.
        set_peft_model_state_dict(self.model, dict(stored), adapter_name=self.name)
        own = self.weights(stored)
        lost = [k for k, v in stored.items() if not torch.equal(own[k].cpu(), v.to(own[k].dtype))]
        if lost:
            raise InputError(
                "An adapter's weights must be in the model once peft has put them there. Found "
                f"others in {', '.join(lost[:8])}. Save the whole model's state_dict() in place of "
                "the adapter's folder."
            )

    def other_settings(self, config: Path) -> tuple[list[str], list[str]]:
        """Return in words an ``adapter_config.json``'s settings that the model has not.

        Returns those that decide numbers; and those that determine which weights exist, whose
        difference is harmless where keys and shapes fit.
        """
        own = self.model.peft_config[self.name]
        stored = _read(config)
        saved, mine = _plain(_as_peft_reads(stored, own, config)), _plain(own.to_dict())
        differing = {
            key: f"{key} {saved[key]!r} for {mine[key]!r}"
            for key in sorted(saved)
            if key not in _TRAINING_SETTINGS and saved[key] != mine[key]
        }
        # Settings of a newer peft; those that are off change nothing.
        unknown = {
            key: f"{key} {value!r}, which this version of peft doesn't know: install a newer one"
            for key, value in stored.items()
            if value and key not in mine and key not in _TRAINING_SETTINGS
        }
        of_layers = [text for key, text in differing.items() if key in _LAYER_SETTINGS]
        of_numbers = [t for key, t in (differing | unknown).items() if key not in _LAYER_SETTINGS]
        return of_numbers, of_layers


def _read(config: Path) -> dict[str, Any]:
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or not isinstance(stored.get("peft_type"), str):
            raise ValueError("it has no `peft_type`")
        return stored
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{config}: an adapter's config must be JSON, as PeftModel.save_pretrained writes it. "
            f"Reading it failed: {error}. Save the adapter again.",
            code="study.adapter_config",
        ) from error


def _as_peft_reads(stored: dict[str, Any], own: Any, config: Path) -> dict[str, Any]:
    """Return saved settings with peft's defaults for those that an older version didn't have."""
    if stored["peft_type"] != own.peft_type.value:
        raise InputError(
            f"{config}: an adapter must be of the kind that make_model() builds. Found peft_type "
            f"{stored['peft_type']} for {own.peft_type.value}. Build the model with the config of "
            "the training: `PeftConfig.from_pretrained(folder)`.",
            code="study.adapter_kind",
        )
    known = {key: value for key, value in stored.items() if key in own.to_dict()}
    try:
        return type(own)(**known).to_dict()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{config}: peft must be able to read an adapter's config. It failed: {error}. Save "
            "the adapter again, or install the version of peft that it was saved with.",
            code="study.adapter_config",
        ) from error


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them, sets sorted, so that equal ones are equal."""

    def plain_value(value: Any) -> Any:
        return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)

    plain = json.loads(json.dumps(dict(settings), default=plain_value))
    for key, value in plain.items():
        if key.startswith("init_") and key.endswith("weights") and value in _INITS:
            plain[key] = "the base stays"
    return plain
