"""Select the parameters to differentiate, and set a model up for that."""

import contextlib
import fnmatch
from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor, nn

from trak_core.errors import InputError, listed
from trak_core.gradients.torch_workarounds import plain_layers


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Generator[None, None, None]:
    """Run with the model in evaluation mode.

    Dropout is off and BatchNorm uses its stored statistics; afterwards each module has its own mode
    again. The inference kernels of torch's transformer layers, taken when only other layers are
    differentiated, are off because they leave no graph to read. Layers run in their plain form.
    """
    training = [module for module in model.modules() if module.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with plain_layers(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module in training:
            module.training = True


@contextlib.contextmanager
def graph_to(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
    """Run with a graph to these parameters alone, so that nothing is saved for the others."""
    chosen = {id(parameter) for parameter in parameters}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@contextlib.contextmanager
def differentiating(
    model: nn.Module, parameters: Iterable[nn.Parameter]
) -> Generator[None, None, None]:
    """Run in evaluation mode, with a graph to these parameters alone."""
    with in_evaluation_mode(model), graph_to(model, parameters):
        yield


def check_graph(values: Tensor) -> None:
    """Refuse a model output that depends on no parameter."""
    if not values.requires_grad:
        raise InputError(
            "The model output must depend on a parameter that is differentiated. Found none that "
            "leads to it: don't call the model under `torch.no_grad()` or `inference_mode()`, "
            "don't `detach()` on the way, and choose `parameters` that play a part.",
            code="gradients.no_graph",
        )


def select_parameters(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to differentiate, in ``named_parameters`` order.

    A pattern means the parameters with ``requires_grad`` that it matches. Only where it matches
    none of them it means frozen ones: ``*lora_*`` finds an adapter that was loaded for inference,
    and ``*layers.0.*``, where only adapters are trained, that layer's adapter alone. Frozen
    parameters that are returned have ``requires_grad`` from then on.

    Patterns are shell-style (``layer4.*``), of full parameter names; None takes all that have
    ``requires_grad``. Refused is a pattern that matches no parameter, or one whose numbers aren't
    real and floating-point; and a model with nothing to differentiate.
    """
    named = dict(model.named_parameters())
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    if patterns is None and not trainable:
        raise InputError(
            f"The model must have a parameter with requires_grad. Found none of {len(named)}. Name "
            "in the config's `parameters` those to differentiate, frozen or not, such as "
            '["*lora_*"]; or don\'t freeze them in make_model().',
            code="gradients.no_parameter",
        )
    chosen = set(trainable)
    if patterns is not None:
        chosen = {name for pattern in patterns for name in _matches(pattern, trainable, named)}
    selected = {name: parameter for name, parameter in named.items() if name in chosen}
    complex_ones = [f"{name} {p.dtype}" for name, p in selected.items() if p.is_complex()]
    if complex_ones:
        raise InputError(
            "Parameters that are differentiated must hold real numbers. Found "
            f"{listed(complex_ones)}. Hold real and imaginary parts as one real parameter "
            "`nn.Parameter(torch.view_as_real(w))`, read it by `torch.view_as_complex`, and save "
            "the checkpoint's weights likewise; or choose `parameters` that leave them out.",
            code="gradients.complex_parameter",
        )
    integers = [f"{name} {p.dtype}" for name, p in selected.items() if not p.is_floating_point()]
    if integers:
        raise InputError(
            "Parameters that are differentiated must hold floating-point numbers. Found "
            f"{listed(integers)}, as quantized weights are. Choose `parameters` that leave "
            "them out, or load the model without quantization.",
            code="gradients.integer_parameter",
        )
    for parameter in selected.values():
        parameter.requires_grad_(True)
    return selected


def _matches(pattern: str, trainable: list[str], named: dict[str, nn.Parameter]) -> list[str]:
    for names in (trainable, list(named)):
        if matching := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return matching
    raise InputError(
        "Every pattern under `parameters` must match the name of a parameter. Found "
        f"{pattern!r}, which matches none of {listed(named) or 'no parameters'}.",
        code="gradients.unmatched_pattern",
    )


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return p, the number of entries of the parameters."""
    return sum(p.numel() for p in parameters.values())
