"""Read Adam's second moments from the optimizer's state that lies with a checkpoint.

An optimizer's state numbers its parameters, group after group, and has names only if the optimizer
was given them. Without names, parameters are matched to groups by order and shape; an ambiguous
match is refused.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trak_core.errors import InputError
from trak_core.spec import OPTIMIZER_FILE
from trak_core.study.checkpoints import shared_prefixes
from trak_core.study.tensor_files import Digest, read_tensors

# Where a file of model and optimizer has the latter.
_KEYS = ("optimizer_state_dict", "optimizer")
# Partial matches of parameters that are followed at the same time.
_MOST_WAYS = 10_000


def adam_scales(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    trained: Collection[str],
    checkpoint: Path,
) -> tuple[dict[str, Tensor], str]:
    """Return what Adam multiplies each entry of a gradient by: 1 / (sqrt(v / (1 - b^t)) + eps).

    v is the running mean of squared gradients (with ``amsgrad`` the largest that there was), b its
    rate beta_2, and t how many steps it has seen.
    An entry whose gradient was always 0 in training gets 0: nothing in training moved it.

    Args:
        model: With the checkpoint's weights.
        parameters: Those to differentiate, by name.
        trained: Names of those that had ``requires_grad`` when the study had made the model.
        checkpoint: A folder with ``optimizer.pt``, as transformers' Trainer saves it, or a file
            with the state of model and optimizer.

    Returns:
        By name, in each parameter's shape, float32, on the CPU; and the SHA-256 of the file with
        the state, 64 hexadecimal digits.

    Raises:
        InputError: If there is no state of an Adam there that is known to be of these parameters.

    Source: Kingma and Ba, "Adam", ICLR 2015, algorithm 1.
    """
    source = checkpoint / OPTIMIZER_FILE if checkpoint.is_dir() else checkpoint
    digest = hashlib.sha256()
    groups, moments = _state(source, digest)
    numbers = _numbers(model, {*parameters}, {*trained}, groups, moments, source)
    lacking = [name for name in parameters if numbers.get(name) not in moments]
    if lacking:
        raise InputError(
            f"{source}: every parameter that is differentiated must have second moments. Found "
            f"none for {_listed(lacking)}, which had no gradient in training. Leave out what was "
            "not trained, by `parameters`."
        )
    about = {number: group for group in groups for number in group["params"]}
    scales = {}
    for name, parameter in parameters.items():
        moment, group = moments[numbers[name]], about[numbers[name]]
        v = moment.get("max_exp_avg_sq", moment["exp_avg_sq"])
        fits = v.shape == parameter.shape and v.is_floating_point()
        if not fits or not (v.isfinite() & (v >= 0)).all():
            raise InputError(
                f"{source}: second moments must be real, of their parameter's shape, finite and at "
                f"least 0. Found others for {name}. Take another checkpoint, or train again."
            )
        scales[name] = _scale(v.float(), moment, group)
    return scales, digest.hexdigest()


def _scale(v: Tensor, moment: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    root = (v / (1 - group["betas"][1] ** float(moment["step"]))).sqrt()
    return torch.where(v > 0, 1 / (root + group["eps"]), 0)


def _state(source: Path, digest: Digest) -> tuple[list[dict[str, Any]], dict[int, dict[str, Any]]]:
    """Return groups of parameters, and by number what has second moments."""
    how = (
        "`preconditioner: adam` takes folders that transformers' Trainer saved, without "
        "save_only_model, and files of {'model_state_dict': ..., 'optimizer_state_dict': ...}"
    )
    if not source.is_file():
        raise InputError(
            f"{source}: the optimizer's state must lie with the weights. Found no such file. {how}."
        )
    if source.suffix == ".safetensors":
        raise InputError(f"{source}: safetensors hold no optimizer. Name their folder: {how}.")
    must = "an optimizer's state must be a whole file of torch.save"
    found = read_tensors(source, must, f"{how}.", digest)
    inside = found if isinstance(found, dict) else {}
    state = next((inside[key] for key in _KEYS if key in inside), inside)
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        keys = ", ".join(map(str, list(inside)[:5])) or "none"
        raise InputError(
            f"{source}: an optimizer's state must have `state` and `param_groups`. Found the keys "
            f"{keys}. {how}."
        )
    moments = {
        number: one
        for number, one in state["state"].items()
        if isinstance(one.get("exp_avg_sq"), Tensor) and "step" in one
    }
    groups = state["param_groups"]
    if not moments or not all("betas" in group and "eps" in group for group in groups):
        kept = sorted({str(key) for one in state["state"].values() for key in one})
        raise InputError(
            f"{source}: the optimizer must be an Adam of torch's, with `exp_avg_sq` in its state "
            "and `betas` and `eps` in its groups, and have taken a step. Found in its state "
            f"{', '.join(kept[:8]) or 'nothing'}. Leave `preconditioner` out."
        )
    return groups, moments


def _numbers(
    model: nn.Module,
    selected: set[str],
    trained: set[str],
    groups: Sequence[Mapping[str, Any]],
    moments: Mapping[int, Mapping[str, Any]],
    source: Path,
) -> dict[str, int]:
    """Return the number of every parameter that the optimizer had, by name."""
    ids = [list(group["params"]) for group in groups]
    flat = [number for group in ids for number in group]
    if all("param_names" in group for group in groups):  # optimizers that were given names
        given = [str(name) for group in groups for name in group["param_names"]]
        bare = ([n.removeprefix(prefix) for n in given] for prefix in shared_prefixes(given))
        given = next((names for names in bare if selected <= {*names}), given)
        unknown = selected - set(given)
        if unknown or len(given) != len(flat):
            raise InputError(
                f"{source}: the optimizer's names must be those of the model that make_model() "
                f"returns. Found no {_listed(sorted(unknown))} among {_listed(given)}."
            )
        return dict(zip(given, flat, strict=True))
    shapes = {
        number: tuple(moments[number]["exp_avg_sq"].shape) if number in moments else None
        for number in flat
    }
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    # Those that are trained; where all were frozen for inference, those that are asked for.
    ways = 0
    for names in (trained, selected, {*named}):
        own = {name: shape for name, shape in named.items() if name in names}
        if len(own) == len(shapes):
            ways, order = _orders(list(own.values()), ids, shapes)
            if ways == 1:
                return dict(zip(own, order, strict=True))
    several = "several ways to tell" if ways else "no way to tell"
    raise InputError(
        f"{source}: the optimizer's parameters must be those of the model that make_model() "
        "returns, group after group in its order, told apart by their shapes. Found "
        f"{len(shapes)} in {len(ids)} groups, beside {len(trained)} with requires_grad of the "
        f"model's {len(named)}, and {several} which is which. Let make_model() freeze what was "
        "frozen in training and nothing else (PeftModel.from_pretrained takes is_trainable=True), "
        "or give the optimizer names, `AdamW(model.named_parameters())`, which it then saves."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")


def _orders(
    wanted: Sequence[tuple[int, ...]],
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
) -> tuple[int, list[int]]:
    """Take numbers from the groups, each group in its order, so that shapes are as wanted.

    Returns:
        How many ways there are, and the numbers in order if it is one.
    """
    # By how many are taken from each group: in how many ways, and the last way, backwards.
    ways: dict[tuple[int, ...], tuple[int, Any]] = {(0,) * len(groups): (1, ())}
    for shape in wanted:
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for places, (count, way) in ways.items():
            for i, (place, group) in enumerate(zip(places, groups, strict=True)):
                if place < len(group) and shapes[group[place]] in (shape, None):
                    after = (*places[:i], place + 1, *places[i + 1 :])
                    before, _ = following.get(after, (0, ()))
                    following[after] = before + count, (group[place], way)
        if len(following) > _MOST_WAYS:
            return len(following), []
        ways = following
    count, way = next(iter(ways.values()), (0, ()))
    order: list[int] = []
    while way:
        number, way = way
        order.append(number)
    return count, order[::-1]
