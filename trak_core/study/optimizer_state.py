"""Read Adam's second moments from the optimizer's state that is saved with a checkpoint.

An optimizer's state identifies parameters by numbers, which continue from one parameter group to
the next. It also contains the names of the parameters if the optimizer was created with named
parameters. Otherwise, numbers are assigned to the model's parameters by order and shape, and it is
an error if more than one assignment is possible.
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

# Keys under which training scripts store the optimizer's state in a file with the model's state.
_KEYS = ("optimizer_state_dict", "optimizer")
_TAKES = (
    "`preconditioner: adam` accepts a folder that transformers' Trainer saved without "
    "save_only_model, and a file of {'model_state_dict': ..., 'optimizer_state_dict': ...}."
)
_MAX_MATCHES = 10_000  # The number of partial matches at which the search is given up.


def adam_scales(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    trained: Collection[str],
    checkpoint: Path,
) -> tuple[dict[str, Tensor], str]:
    """Return the factors by which Adam multiplies a gradient: 1 / (sqrt(v / (1 - b^t)) + eps).

    v is the running mean of squared gradients (with ``amsgrad``, the maximum of the mean), b is the
    decay rate beta_2, and t is the number of steps. If v is 0, the factor is 0, because the
    gradient was 0 throughout training.

    Args:
        model: The model that make_model() builds.
        parameters: The parameters for which gradients are computed, by name.
        trained: Names of the parameters that have ``requires_grad=True`` in a newly built model.
        checkpoint: A folder that contains ``optimizer.pt``, as transformers' Trainer saves it, or a
            file that contains the states of the model and the optimizer.

    Returns:
        A float32 tensor of factors on the CPU for each parameter's name, and the file's SHA-256.

    Raises:
        InputError: If the file has no state of Adam, or if it is unclear which of its parameters
            is which parameter of the model.

    Source: Kingma and Ba, "Adam", ICLR 2015, algorithm 1.
    """
    source = checkpoint / OPTIMIZER_FILE if checkpoint.is_dir() else checkpoint
    groups, moments, sha256 = _read_state(source)
    numbers = _numbers(model, {*parameters}, {*trained}, groups, moments, source)
    lacking = [name for name in parameters if numbers.get(name) not in moments]
    if lacking:
        raise InputError(
            f"{source}: every selected parameter must have second moments. Found none for "
            f"{listed(lacking)}, because training computed no gradients for them. Exclude these "
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
    """Return the parameter groups, the state of each parameter by number, and the SHA-256."""
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
    """Return a dict from the names of parameters to their numbers in the optimizer's state."""
    ids = [list(group["params"]) for group in groups]
    flat = [number for group in ids for number in group]
    if all("param_names" in group for group in groups):  # The optimizer stored names.
        given = [str(name) for group in groups for name in group["param_names"]]
        # A wrapper around the trained model adds a prefix to all names. Remove the prefix after
        # which the most names are names in the model. If several are equally good, remove the
        # shortest, because a submodule can have parameters of the same names as the model.
        own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        bare = ([n.removeprefix(prefix) for n in given] for prefix in shared_prefixes(given))
        given = max(bare, key=lambda names: len(own.intersection(names)))
        unknown = selected - set(given)
        if unknown or len(given) != len(flat):
            raise InputError(
                f"{source}: the optimizer's parameters must have the same names as those of the "
                f"model that make_model() returns. Found no {listed(sorted(unknown))} among the "
                f"optimizer's names {listed(given)}. Let make_model() build the model that was "
                "trained.",
                code="study.optimizer_names",
            )
        return dict(zip(given, flat, strict=True))
    shapes = {
        number: tuple(moments[number]["exp_avg_sq"].shape) if number in moments else None
        for number in flat
    }
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    orders: list[list[int]] = []
    # If make_model() freezes the model for inference, ``trained`` is empty. Therefore, the selected
    # parameters and all parameters are tried, too.
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
        f"{len(trained)} of {len(named)} parameters have requires_grad=True. Order and shape give "
        f"{matches}. Let make_model() freeze the same parameters as in training (for PEFT, "
        "call PeftModel.from_pretrained with is_trainable=True). Or train with "
        "`AdamW(model.named_parameters())`, which stores the names.",
        code="study.optimizer_order",
    )


def _orders(
    expected: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
) -> list[list[int]]:
    """Return orders of an optimizer's parameters in which they have the shapes ``expected``.

    ``groups`` contains the numbers of the parameters in each parameter group, which keep their
    order. ``shapes`` maps these numbers to shapes. A shape of None fits any expected shape. At most
    two orders are returned, which is enough to know whether the order is unique.
    """
    # Orders of the first parameters, by the number of parameters taken from each group.
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
