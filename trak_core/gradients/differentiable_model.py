"""Select the parameters to differentiate, and set a model and autograd up for that.

Some of torch's kernels and layers' settings would not give the gradients of f.
"""

import contextlib
import fnmatch
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from trak_core.errors import InputError, listed
from trak_core.gradients.graph import Node, nodes_below


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Generator[None, None, None]:
    """Run with the model in evaluation mode.

    Dropout is off and BatchNorm uses its stored statistics; afterwards each module has its own mode
    again. The inference kernels of torch's transformer layers, taken when only other layers are
    differentiated, are off because they leave no graph to read. Layers run in their plain form.
    What modules derived from parameters and keep in a cache is derived anew.
    """
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    if training:
        model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    _empty_caches(modules)
    try:
        with plain_layers():
            yield
    finally:
        _empty_caches(modules)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module in training:
            module.training = True


def _empty_caches(modules: Iterable[nn.Module]) -> None:
    """Have modules that keep a cache until training empty it; all are in evaluation mode.

    LeViT, TinyViT and EfficientFormer of timm keep biases that they derive from parameters. The
    graph of such a bias is used up by one pass, or isn't there, so that its parameter's gradient
    would be 0. What a module forgets for training is its own choice, in ``train``: other caches
    may hold what nobody makes again.
    """
    for module in modules:
        if type(module).train is not nn.Module.train and any(
            "cache" in name and value for name, value in vars(module).items()
        ):
            module.train()  # which returns nothing in timm
            module.eval()


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
            "don't `detach()` on the way, give `torch.autograd.grad` in a model "
            "`create_graph=True`, and choose `parameters` that play a part.",
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
    real and floating-point; a model with nothing to differentiate; and one that gets shapes later.
    """
    tensors = *model.named_parameters(), *model.named_buffers()
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise InputError(
            "A model must have all its shapes when make_model() returns it. Found none yet for "
            f"{listed(lazy)}. Call a lazy module once, on a sample, in make_model().",
            code="gradients.lazy_parameter",
        )
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


def refuse_hooks(
    model: nn.Module, parameters: Mapping[str, Tensor], way: str, instead: str
) -> None:
    """Refuse backward hooks where ``torch.func``, which runs none, differentiates."""
    hooked = [name for name, parameter in parameters.items() if parameter._backward_hooks]
    hooked += [
        name or "the model itself"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if hooked:
        raise InputError(
            f"Parameters and modules must have no backward hooks for {way}. Found hooks on "
            f"{listed(hooked)}. {instead}, or remove the hooks.",
            code="gradients.hooks",
        )


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return p, the number of entries of the parameters."""
    return sum(p.numel() for p in parameters.values())


@contextlib.contextmanager
def plain_layers() -> Generator[None, None, None]:
    """Run models so that autograd gives the gradients of its output, as tensors that can be read.

    Tables of embeddings give dense gradients, which counts of words don't divide. What a model
    calls by ``torch.utils.checkpoint`` is called itself: a graph that computes activations again
    lets them be read only once. What was compiled runs as it is written. No number of a model's
    output changes.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # which is slow to import, and compiles nothing before
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, function in (("embedding", _embedding), ("embedding_bag", _embedding_bag)):
            _put(stack, torch, name, partial(function, getattr(torch, name)))
        # A model may have imported the function itself, which looks these up in its module.
        _put(stack, checkpoint, "CheckpointFunction", _Called)
        if hasattr(checkpoint, "_checkpoint_without_reentrant_generator"):
            _put(stack, checkpoint, "_checkpoint_without_reentrant_generator", _called)
        yield


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


# torch's functions for every look-up, by a layer or not. Without the settings that keep a gradient
# sparse for an optimizer, or scale it.
def _embedding(
    function: Callable[..., Tensor],
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    return function(weight, indices, padding_idx, False, False)


def _embedding_bag(
    function: Callable[..., Any],
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    *others: Any,
    **named: Any,
) -> Any:
    return function(weight, indices, offsets, False, mode, False, *others, **named)


class _Called:
    """Stands for torch's function of the same method, and calls what it is given."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
        return function(*arguments)


def _called(*_: Any, **__: Any) -> Generator[None, None, None]:
    """Stand for the code that torch runs before and after what it checkpoints."""
    yield


@contextlib.contextmanager
def memory_formats_kept_apart(values: Tensor) -> Generator[None, None, None]:
    """Run backward passes in which BatchNorm reads gradients in the order in which they lie.

    torch's CPU kernel runs over gradient and input side by side, if both are dense and their
    strides suggest one memory format. A dimension of size 1, above all the samples' in a batch of
    one, may have any stride, so that a gradient with the channels last suggests that they come
    first. Then gradients of all that lies above the layer are wrong, in training mode too. A
    gradient with gaps goes through the kernel that heeds strides.

    InstanceNorm is a BatchNorm with one sample. Gradients that torch reads rightly stay as they
    are, bit for bit. The passes begin at ``values`` or below.
    """
    nodes = [] if values.grad_fn is None else nodes_below(values.grad_fn)
    # Hooks must go: they hold their node, which holds them.
    with ExitStack() as hooks:
        for node in nodes:
            if node.name() == "NativeBatchNormBackward0":
                hooks.callback(node.register_prehook(_reader(node)).remove)
        del nodes
        yield


def _reader(node: Node) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...] | None]:
    def read(gradients: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        gradient, *others = gradients
        # Raw, because checkpointed activations may be unpacked only once; they are no tensors yet.
        saved = node._raw_saved_input.data
        if 1 not in gradient.shape or not _may_be_confused(gradient, saved):
            return None
        return (torch.nn.functional.pad(gradient, (0, 1))[..., :-1], *others)

    return read


def _may_be_confused(gradient: Tensor, saved: object) -> bool:
    first, last = _dense_formats(gradient)
    if not isinstance(saved, Tensor):
        return first != last
    saved_first, saved_last = _dense_formats(saved)
    differ = not ((first and saved_first) or (last and saved_last))
    return differ and (first or last) and (saved_first or saved_last)


def _dense_formats(tensor: Tensor) -> tuple[bool, bool]:
    """Return whether entries lie one after another with the channels first, and last.

    ``Tensor.is_contiguous`` says the same, but not under vmap.
    """
    dims = list(range(tensor.ndim))
    first, last = (_is_dense(tensor, order) for order in (dims, [0, *dims[2:], 1]))
    return first, last and tensor.ndim > 3


def _is_dense(tensor: Tensor, order: Sequence[int]) -> bool:
    stride = 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            continue
        if tensor.stride(dim) != stride:
            return False
        stride *= tensor.shape[dim]
    return True
