"""Read Adam's second moments from the optimizer's state that is saved with a checkpoint.

In an optimizer's state, parameters are numbered, group by group. They also have names if the
optimizer was created with named parameters. Otherwise the model's parameters are matched with the
numbers by order and shape, and an ambiguous match raises an error.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.settings import OPTIMIZER_FILE
from trak_core.study.match_state_dict import shared_prefixes
from trak_core.study.weight_files import read_tensors

# Keys of the optimizer's state in a file that also contains the model's state.
_KEYS = ("optimizer_state_dict", "optimizer")
_TAKES = (
    "`preconditioner: adam` accepts a folder that transformers' Trainer saved without "
    "save_only_model, and a file of {'model_state_dict': ..., 'optimizer_state_dict': ...}."
)
_MAX_MATCHES = 10_000  # If there are more partial matches, the search stops.


def adam_scales(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    trained: Collection[str],
    checkpoint: Path,
) -> tuple[dict[str, Tensor], str]:
    """Return the factors by which Adam multiplies a gradient: 1 / (sqrt(v / (1 - b^t)) + eps).

    v is the running mean of squared gradients (with ``amsgrad``, the maximum of the mean), b is the
    decay rate beta_2, and t is the number of steps. For v = 0, the factor is 0, because the
    gradient of such an entry was 0 in the whole training.

    Args:
        model: The model.
        parameters: The parameters for which gradients are computed, by name.
        trained: Names of the parameters that have ``requires_grad`` in a new model.
        checkpoint: A folder with ``optimizer.pt``, as transformers' Trainer saves it, or a file
            with the states of model and optimizer.

    Returns:
        The factors by the name of the parameter (float32, on the CPU), and the SHA-256 of the file.

    Raises:
        InputError: If the file has no state of Adam, or if its numbers of parameters cannot be
            matched with the model's parameters.

    Source: Kingma and Ba, "Adam", ICLR 2015, algorithm 1.
    """
    source = checkpoint / OPTIMIZER_FILE if checkpoint.is_dir() else checkpoint
    groups, moments, sha256 = _read_state(source)
    numbers = _numbers(model, {*parameters}, {*trained}, groups, moments, source)
    lacking = [name for name in parameters if numbers.get(name) not in moments]
    if lacking:
        raise InputError(
            f"{source}: every selected parameter must have second moments. Found none for "
            f"{listed(lacking)}, because training computed no gradient for it. Exclude these "
            "parameters with the setting `parameters`.",
            code="study.second_moments",
        )
    group_of = {number: group for group in groups for number in group["params"]}
    scales = {}
    for name, parameter in parameters.items():
        moment, group = moments[numbers[name]], group_of[numbers[name]]
        v = moment.get("max_exp_avg_sq", moment["exp_avg_sq"])
        fits = v.shape == parameter.shape and v.is_floating_point()
        if not fits or not (v.isfinite() & (v >= 0)).all():
            raise InputError(
                f"{source}: second moments must be real, finite and at least 0, and have the shape "
                f"of the parameter. Found other values or another shape for {name}. Use another "
                "checkpoint, or train again.",
                code="study.second_moments",
            )
        v = v.float()
        # v / (1 - b^t) corrects the bias of the running mean, which starts from 0.
        root = (v / (1 - group["betas"][1] ** float(moment["step"]))).sqrt()
        scales[name] = torch.where(v > 0, 1 / (root + group["eps"]), 0)
    return scales, sha256


def _read_state(source: Path) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]], str]:
    """Return the groups of parameters, the state of each numbered parameter, and the SHA-256."""
    digest = hashlib.sha256()
    must = "an optimizer's state must be a whole file of torch.save"
    saved = read_tensors(source, must, _TAKES, digest)
    entries = saved if isinstance(saved, dict) else {}
    state = next((entries[key] for key in _KEYS if key in entries), entries)
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        keys = ", ".join(map(str, list(entries)[:5])) or "none"
        raise InputError(
            f"{source}: an optimizer's state must have `state` and `param_groups`. Found the keys "
            f"{keys}. {_TAKES}",
            code="study.optimizer_state",
        )
    moments = {
        number: entry
        for number, entry in state["state"].items()
        if isinstance(entry.get("exp_avg_sq"), Tensor) and "step" in entry
    }
    groups = state["param_groups"]
    if not moments or not all("betas" in group and "eps" in group for group in groups):
        keys = sorted({str(key) for entry in state["state"].values() for key in entry})
        raise InputError(
            f"{source}: the optimizer must be a variant of torch's Adam that has taken a step. "
            "Its state must contain `exp_avg_sq`, and its groups `betas` and `eps`. Found a state "
            f"with {', '.join(keys[:8]) or 'nothing'}. Leave `preconditioner` out.",
            code="study.optimizer_kind",
        )
    return groups, moments, digest.hexdigest()


def _numbers(
    model: nn.Module,
    selected: set[str],
    trained: set[str],
    groups: Sequence[Mapping[str, Any]],
    moments: Mapping[int, Mapping[str, Any]],
    source: Path,
) -> dict[str, int]:
    """Return the number of each parameter in the optimizer's state, by the parameter's name."""
    ids = [list(group["params"]) for group in groups]
    flat = [number for group in ids for number in group]
    if all("param_names" in group for group in groups):  # The optimizer stored names.
        given = [str(name) for group in groups for name in group["param_names"]]
        # Remove the shared prefix for which most names are names in the model. If several prefixes
        # are equally good, remove the shortest, because a submodule can have the model's names.
        own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        bare = ([n.removeprefix(prefix) for n in given] for prefix in shared_prefixes(given))
        given = max(bare, key=lambda names: len(own.intersection(names)))
        unknown = selected - set(given)
        if unknown or len(given) != len(flat):
            raise InputError(
                f"{source}: the optimizer must have the same names of parameters as the model from "
                f"make_model(). Found no {listed(sorted(unknown))} in its names {listed(given)}.",
                code="study.optimizer_names",
            )
        return dict(zip(given, flat, strict=True))
    shapes = {
        number: tuple(moments[number]["exp_avg_sq"].shape) if number in moments else None
        for number in flat
    }
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    orders: list[list[int]] = []
    # ``trained`` is empty if the model is frozen for inference, so other sets are tried as well.
    for names in (trained, selected, {*named}):
        own = {name: shape for name, shape in named.items() if name in names}
        if len(own) == len(shapes):
            orders = _orders([*own.values()], ids, shapes)
            if len(orders) == 1:
                return dict(zip(own, orders[0], strict=True))
    matches = "more than one match" if orders else "no match"
    raise InputError(
        f"{source}: the optimizer's parameters must be those of the model that make_model() "
        f"returns. Found {len(shapes)} parameters in {len(ids)} groups. In the model, "
        f"{len(trained)} of {len(named)} parameters have requires_grad. There is {matches} by "
        "order and shape. Let make_model() freeze the same parameters as in training (for PEFT, "
        "call PeftModel.from_pretrained with is_trainable=True). Or train with "
        "`AdamW(model.named_parameters())`, which stores the names.",
        code="study.optimizer_order",
    )


def _orders(
    expected: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
) -> list[list[int]]:
    """Return ways to merge the numbers in ``groups`` so that their shapes are ``expected``.

    Numbers of the same group keep their order. At most two ways are returned, which is enough to
    show whether the match is unique. A shape of None fits any expected shape.
    """
    # The key of a partial match contains the number of parameters taken from each group.
    partial: dict[tuple[int, ...], list[list[int]]] = {(0,) * len(groups): [[]]}
    for shape in expected:
        longer = defaultdict(list)
        for taken, orders in partial.items():
            for i, (position, group) in enumerate(zip(taken, groups, strict=True)):
                if position < len(group) and shapes[group[position]] in (shape, None):
                    after = longer[*taken[:i], position + 1, *taken[i + 1 :]]
                    after += [[*order, group[position]] for order in orders[: 2 - len(after)]]
        partial = longer
        if len(partial) > _MAX_MATCHES:
            break
    return [order for orders in partial.values() for order in orders]
