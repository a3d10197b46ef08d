"""Build a model whose weights a checkpoint will give, without drawing them first.

Drawing takes a large model's job longer than reading its weights does. Parameters are built on
torch's meta device, where a draw costs nothing and no number can be read; all else is as ever.
What comes of a parameter is on that device too: where any of it is left, or a build fails so, the
model is built again, with all its numbers.
"""

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _NoticeErrors(TorchDispatchMode):
    """Notices operations that fail, which the model's own code may try another way after."""

    failed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, a second of every job, to pass this over

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.failed = True
            raise


def built_empty(make_model: Callable[[], nn.Module]) -> nn.Module | None:
    """Return a model whose parameters hold any numbers, and that is as built otherwise.

    None where that can't be told: a build that fails so, draws other random numbers, or keeps
    anything that came of a parameter. The random numbers of torch are then as before.
    """
    register, metas = nn.Module.register_parameter, dict[int, nn.Parameter]()

    def register_on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if type(value) is nn.Parameter and not value.is_meta:
            meta = metas.setdefault(id(value), nn.Parameter(value.to("meta"), value.requires_grad))
            vars(meta).update(vars(value), _built=value)  # whose id is no other's meanwhile
            value = meta
        register(module, name, value)

    state, errors = torch.get_rng_state(), _NoticeErrors()
    # Its own errors come when it is built with numbers.
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        with patch.object(nn.Module, "register_parameter", register_on_meta), errors:
            model = make_model()
        if not errors.failed and torch.equal(torch.get_rng_state(), state):
            metas.clear()
            return model if _filled(model) else None
    torch.set_rng_state(state)
    return None


def _filled(model: nn.Module) -> bool:
    """Give parameters memory in place of those on meta; return whether nothing is left there."""
    storages = [p.untyped_storage()._cdata for p in model.parameters() if p.is_meta]
    if len({*storages}) < len(storages):
        return False  # several have the same numbers
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in [*module._parameters.items()]:
            if meta is not None and meta.is_meta:
                empty = nn.Parameter(torch.empty_like(meta, device="cpu"), meta.requires_grad)
                vars(empty).update({k: v for k, v in vars(meta).items() if k != "_built"})
                module._parameters[name] = real.setdefault(id(meta), empty)
    meta = None  # the last
    return not any(issubclass(type(it), Tensor) and it.is_meta for it in gc.get_objects())
