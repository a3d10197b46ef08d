"""Select the parameters for which to compute gradients, and prepare a model for this.

Features of torch and caches of models are switched off if they would make gradients wrong or
autograd's graph unreadable.
"""

import contextlib
import fnmatch
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint

from trak_core.errors import InputError, listed
from trak_core.gradients.graph import Node, nodes_below, strides


@contextlib.contextmanager
def in_evaluation_mode(model: nn.Module) -> Generator[None, None, None]:
    """Run with the model in evaluation mode, and restore each module's mode afterwards.

    In this context, the features of torch that ``plain_layers`` names are switched off, and so are
    the inference kernels of torch's transformer layers, which build no graph. Modules' caches of
    tensors that are computed from parameters are emptied.
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
    """Empty caches that modules keep in evaluation mode, by switching to training mode and back.

    In timm, LeViT, TinyViT and EfficientFormer cache biases that are computed from parameters. A
    cached bias has no graph, or a graph that was freed, so the parameters' gradients would be 0.
    Modules with such a cache override ``train`` to empty the cache. Therefore, only modules that
    override ``train`` are switched.
    """
    for module in modules:
        if type(module).train is not nn.Module.train and any(
            "cache" in name and value for name, value in vars(module).items()
        ):
            module.train()  # not chained, because timm's method returns None
            module.eval()


@contextlib.contextmanager
def graph_to(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Generator[None, None, None]:
    """Run with ``requires_grad`` for ``parameters`` only, so that autograd saves fewer tensors."""
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
    """Run with the model in evaluation mode, and with ``requires_grad`` for ``parameters`` only."""
    with in_evaluation_mode(model), graph_to(model, parameters):
        yield


def check_graph(values: Tensor) -> None:
    """Raise an error if the model outputs ``values`` depend on no parameter."""
    if not values.requires_grad:
        raise InputError(
            "The model output must depend on at least one of the selected parameters. It "
            "depends on none. Choose other `parameters`. In the model, avoid `no_grad()`, "
            "`inference_mode()`, `detach()` and `torch.autograd.grad` without `create_graph=True`.",
            code="gradients.no_graph",
        )


def select_parameters(model: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters for which to compute gradients, in ``named_parameters`` order.

    Patterns are shell-style (``layer4.*``) and must match full names. A pattern selects the
    matching parameters that have ``requires_grad``. For example, if only adapters are trained,
    ``*layers.0.*`` selects the adapter of layer 0. If all matching parameters are frozen, all of
    them are selected, and their ``requires_grad`` is set to True. Without patterns, all parameters
    that have ``requires_grad`` are selected.

    Raises:
        InputError: If a pattern matches no parameter, if nothing is selected, if a parameter is not
            real and floating-point, or if a lazy module has no shapes yet.
    """
    tensors = *model.named_parameters(), *model.named_buffers()
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise InputError(
            "All parameters must have shapes when make_model() returns the model. These parameters "
            f"have no shape yet: {listed(lazy)}. Call lazy modules on a sample in make_model().",
            code="gradients.lazy_parameter",
        )
    named = dict(model.named_parameters())
    trainable = [name for name, parameter in named.items() if parameter.requires_grad]
    if patterns is None and not trainable:
        raise InputError(
            "At least one parameter of the model must have requires_grad=True. All of its "
            f"{len(named)} parameters are frozen. Set `parameters` to the names of those for which "
            'to compute gradients, such as ["*lora_*"] (they may be frozen), or don\'t freeze all '
            "parameters in make_model().",
            code="gradients.no_parameter",
        )
    chosen = set(trainable)
    if patterns is not None:
        chosen = {name for pattern in patterns for name in _matches(pattern, trainable, named)}
    selected = {name: parameter for name, parameter in named.items() if name in chosen}
    wrong = [f"{name} {p.dtype}" for name, p in selected.items() if not p.is_floating_point()]
    if wrong:
        raise InputError(
            "Selected parameters must be real floating-point numbers. Found "
            f"{listed(wrong)}. Exclude them from `parameters`, or load the model without "
            "quantization. For a complex parameter w, store `torch.view_as_real(w)` in the model "
            "and in checkpoints, and call `torch.view_as_complex` in forward.",
            code="gradients.parameter_dtype",
        )
    for parameter in selected.values():
        parameter.requires_grad_(True)
    return selected


def _matches(pattern: str, trainable: list[str], named: dict[str, nn.Parameter]) -> list[str]:
    for names in (trainable, list(named)):
        if matching := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return matching
    raise InputError(
        "Every pattern under `parameters` must match the name of a parameter. "
        f"{pattern!r} matches none of the names: {listed(named) or 'there are no parameters'}.",
        code="gradients.unmatched_pattern",
    )


def refuse_hooks(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise an error if the model has backward hooks, which ``torch.func`` would not call."""
    hooked = [name for name, parameter in parameters.items() if parameter._backward_hooks]
    hooked += [
        name or "the model itself"
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if hooked:
        raise InputError(
            "Parameters and modules must have no backward hooks, because torch.vmap doesn't call "
            f"them. Found hooks on {listed(hooked)}. Remove the hooks, or compute the gradient of "
            "one sample at a time.",
            code="gradients.hooks",
        )


def n_params(parameters: dict[str, nn.Parameter]) -> int:
    """Return the total number of entries of all parameters."""
    return sum(p.numel() for p in parameters.values())


@contextlib.contextmanager
def plain_layers() -> Generator[None, None, None]:
    """Run without some features of torch that change gradients or hide the graph.

    The model returns the same output without these features:

    - Embeddings get dense gradients, and ``scale_grad_by_freq`` is ignored. It would scale a
      sample's gradient by the number of times that an index occurs in the batch.
    - ``torch.utils.checkpoint`` calls the checkpointed function directly, because activations that
      it recomputes can be read only once.
    - Compiled code runs eagerly, because a compiled function is a single node of the graph.
    """
    embedding, embedding_bag = torch.embedding, torch.embedding_bag

    def plain_embedding(weight, indices, padding_idx=-1, *_, **__):
        return embedding(weight, indices, padding_idx)

    def plain_embedding_bag(
        weight, indices, offsets, scale_grad_by_freq=False, mode=0, sparse=False, *others, **named
    ):
        return embedding_bag(weight, indices, offsets, False, mode, False, *others, **named)

    def do_nothing(*_: Any, **__: Any) -> Generator[None, None, None]:
        """Replace the code that torch runs before and after a checkpointed function."""
        yield

    direct_call = SimpleNamespace(apply=lambda function, _, *arguments: function(*arguments))
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # not imported here, because that takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        _replace(stack, torch, "embedding", plain_embedding)
        _replace(stack, torch, "embedding_bag", plain_embedding_bag)
        # Users may have imported the function ``checkpoint`` itself. Therefore, it is not replaced,
        # but only the names that it looks up in its module at each call.
        _replace(stack, checkpoint, "CheckpointFunction", direct_call)
        for end in ("", "_impl"):  # the names before and since torch 2.15
            if hasattr(checkpoint, name := f"_checkpoint_without_reentrant_generator{end}"):
                _replace(stack, checkpoint, name, do_nothing)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextlib.contextmanager
def memory_formats_kept_apart(values: Tensor) -> Generator[None, None, None]:
    """Avoid wrong gradients of torch's BatchNorm in backward passes from ``values``.

    torch's CPU kernel reads the output gradient and the input in memory order if both are dense and
    their strides suggest the same memory format. A dimension of size 1, such as the batch dimension
    of one sample, may have any stride, so a channels-last gradient can look channels-first. torch
    then computes wrong gradients with respect to the layer's input, without an error. Hooks on the
    graph give such gradients a gap in memory, so that torch uses a kernel that respects strides.
    All other gradients are unchanged, bit for bit. InstanceNorm is affected too, because torch
    computes it as a BatchNorm of one sample.
    """
    # A hook and its node refer to each other. If the hooks were not removed at the end, the nodes
    # would stay in memory.
    with ExitStack() as hooks:
        for node in nodes_below(values.grad_fn) if values.grad_fn is not None else []:
            if node.name() == "NativeBatchNormBackward0":
                hooks.callback(node.register_prehook(partial(_with_gap, node)).remove)
        yield


def _with_gap(node: Node, gradients: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    gradient, *others = gradients
    # The saved tensor is read without unpacking it. A recomputed tensor can be unpacked only once,
    # and BatchNorm itself will do this.
    if 1 not in gradient.shape or not _may_be_confused(gradient, node._raw_saved_input.data):
        return None
    return (torch.nn.functional.pad(gradient, (0, 1))[..., :-1], *others)


def _may_be_confused(gradient: Tensor, saved: object) -> bool:
    formats = _dense_formats(gradient)
    if not isinstance(saved, Tensor):
        return len(formats) == 1
    others = _dense_formats(saved)
    return bool(formats and others) and formats.isdisjoint(others)


def _dense_formats(tensor: Tensor) -> set[str]:
    """Return the memory formats in which a tensor is dense.

    The formats are "first" and "last", for channels first and channels last.
    ``Tensor.is_contiguous`` gives the same information, but doesn't work inside of vmap.
    """

    def is_dense(order: Sequence[int]) -> bool:
        dims = [dim for dim in order if tensor.shape[dim] != 1]
        expected = strides([tensor.shape[dim] for dim in dims])
        return [tensor.stride(dim) for dim in dims] == expected

    dims = range(tensor.ndim)
    orders = {"first": [*dims]} | ({"last": [0, *dims[2:], 1]} if tensor.ndim > 3 else {})
    return {name for name, order in orders.items() if is_dense(order)}
