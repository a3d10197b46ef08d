"""Split samples into inputs and labels, pad and concatenate them, and call a model with them."""

import inspect
import math
import sysconfig
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from trak_core.errors import InputError, first_line, listed
from trak_core.model_outputs.model_output import IGNORED, ModelOutput


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs and labels of some samples. The first dimension of every tensor indexes the samples.

    Attributes:
        args: The model's positional arguments.
        kwargs: The model's named arguments.
        labels: Labels, shape (batch, ...). They are ones if the model output needs no label.
        lengths: Number of tokens of each text, shape (batch,). Shorter texts are padded on the
            right. None if samples need no padding.
        token_inputs: Names (see ``tensors``) of the inputs that are padded like the labels, because
            their second dimension indexes the tokens.
        gives_labels: Whether the model also gets the labels, as the argument ``labels``.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    labels: Tensor
    lengths: Tensor | None = None
    token_inputs: frozenset[str] = frozenset()
    gives_labels: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply ``function``, which must keep the number of tokens, to all tensors of the batch."""
        inputs = {name: function(tensor) for name, tensor in self.tensors()}
        lengths = None if self.lengths is None else function(self.lengths)
        return self.with_inputs(inputs, function(self.labels), lengths)

    def rows(self, rows: slice | Tensor) -> "Batch":
        """Return a batch of some of the samples, with texts padded to the longest of these."""
        chosen = self.mapped(lambda tensor: tensor[rows])
        if chosen.lengths is None or not len(chosen):
            return chosen
        return chosen.cut(int(chosen.lengths.max()))

    def cut(self, length: int) -> "Batch":
        """Return a batch with texts cut to ``length`` tokens. The samples must be texts."""
        assert self.lengths is not None
        inputs = dict(self.tensors())
        inputs |= {name: inputs[name][:, :length] for name in self.token_inputs}
        lengths = self.lengths.clamp(max=length)
        return self.with_inputs(inputs, self.labels[:, :length], lengths)

    def with_inputs(
        self, inputs: Mapping[str, Tensor], labels: Tensor, lengths: Tensor | None
    ) -> "Batch":
        """Return a batch with new labels and new inputs, which are in the order of ``tensors``."""
        tensors = list(inputs.values())
        n_args = len(self.args)
        kwargs = dict(zip(self.kwargs, tensors[n_args:], strict=True))
        args = tuple(tensors[:n_args])
        return replace(self, args=args, kwargs=kwargs, labels=labels, lengths=lengths)

    def given_to(self, model: nn.Module) -> object:
        """Return the model's result. The model gets copies of the inputs, which it may modify."""
        named = {**self.kwargs, "labels": self.labels} if self.gives_labels else self.kwargs
        kwargs = {name: tensor.clone() for name, tensor in named.items()}
        returned = model(*(tensor.clone() for tensor in self.args), **kwargs)
        return without_virtual_tokens(model, returned, self.labels)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor of each input, positional arguments first."""
        yield from ((f"argument {i}", tensor) for i, tensor in enumerate(self.args))
        yield from self.kwargs.items()


def without_virtual_tokens(model: nn.Module, returned: Any, labels: Tensor) -> Any:
    """Return the model's result without the logits of virtual tokens that prompt tuning adds."""
    n_virtual = getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None)
    logits = getattr(returned, "logits", None)
    if not n_virtual or not isinstance(logits, Tensor) or logits.ndim != 3 or labels.ndim < 2:
        return returned
    if logits.shape[1] == labels.shape[1] + n_virtual:
        returned.logits = logits[:, n_virtual:]
    return returned


_SAMPLE = (
    "a tuple of the model's positional arguments followed by the label, or a dict of the model's "
    "named arguments and `labels`"
)
# These ends of messages tell the user to change the samples. ``stages.preflight_study`` replaces
# them for ready-made studies, whose users don't write samples themselves.
CHANGE_SAMPLES = (
    f"If the model doesn't take such inputs, change the samples: a sample must be {_SAMPLE}. "
    "Otherwise correct the model."
)
ONE_SHAPE = "Bring all samples to the same shape."
# A tuple of arguments followed by labels, a dict of named arguments and `labels`, or a batch.
Samples = Sequence[Tensor] | Mapping[str, Tensor] | Batch


def as_batch(samples: Samples, output: ModelOutput) -> Batch:
    """Split samples into inputs and labels.

    ``samples`` is a tuple of the model's positional arguments followed by the labels, or a dict of
    the model's named arguments and ``labels``, or a batch. If the model output needs no labels, the
    tuple or dict contains none. If labels are tokens, a token that ``attention_mask`` excludes as
    padding gets the label ``IGNORED``, and so does a token whose prediction would come from
    padding. For a model with a decoder, the mask is ``decoder_attention_mask``.

    Returns:
        The batch, on the samples' device.

    Raises:
        InputError: If inputs or labels are missing, or if tensors differ in length.
    """
    if isinstance(samples, Batch):
        return samples
    labelled = output.has_labels
    args, kwargs, labels = (), {}, None
    if isinstance(samples, Mapping):
        kwargs = dict(samples)
        labels = kwargs.pop("labels", None) if labelled else None
        form = f"a dict with {', '.join(map(str, samples))}"
    else:
        args = tuple(samples[:-1]) if labelled else tuple(samples)
        labels = samples[-1] if labelled and samples else None
        form = f"a tuple of {len(samples)}"
    if not (args or kwargs) or (labelled and labels is None):
        unlabelled = "a tuple of the model's positional arguments, or a dict of named arguments"
        needed = _SAMPLE if labelled else unlabelled
        remedy = ""
        if output.predicts_next and "input_ids" in kwargs:
            remedy = (
                " For a causal language model, `labels` are the `input_ids`, with -100 for tokens "
                "to ignore."
            )
        raise InputError(
            f"A sample must be {needed}. Found {form}.{remedy}", code="gradients.sample_form"
        )
    if labels is None:
        first = (*args, *kwargs.values())[0]
        labels = torch.ones(len(first), dtype=torch.int64, device=first.device)
    has_decoder = output.takes_labels or any(name.startswith("decoder_") for name in kwargs)
    mask = kwargs.get("decoder_attention_mask" if has_decoder else "attention_mask")
    if output.label_ndim == 1 and mask is not None and mask.shape == labels.shape:
        seen = mask.bool()
        labels = torch.where(seen, labels, IGNORED)
        if output.predicts_next:  # Padding on the left predicts no token.
            labels = torch.where(pad(seen[..., :-1], (1, 0), value=True), labels, IGNORED)
    _check_decoder_inputs(kwargs.get("decoder_input_ids"), labels, output)
    batch = Batch(args, kwargs, labels, gives_labels=output.takes_labels)
    for name, tensor in batch.tensors():
        if tensor.ndim == 0 or len(tensor) != len(batch):
            raise InputError(
                f"Every tensor of a batch must have one row for each sample. Found {len(batch)} "
                f"labels and {name} of shape {tuple(tensor.shape)}.",
                code="gradients.batch_rows",
            )
    return batch


def _check_decoder_inputs(tokens: Tensor | None, labels: Tensor, output: ModelOutput) -> None:
    """Raise an error if a decoder's inputs are shifted although the model output shifts labels."""
    if not output.predicts_next or tokens is None or tokens.shape != labels.shape:
        return
    is_used = labels[:, 1:] != IGNORED
    if (is_used & (tokens[:, 1:] != labels[:, 1:])).any():
        raise InputError(
            "With model_output language_modelling, `decoder_input_ids` must be the same tokens as "
            "`labels`, because the logits at a token predict the next label. Found other tokens. "
            "If `decoder_input_ids` begin with a start token, leave them out and set model_output "
            "to sequence_to_sequence.",
            code="gradients.decoder_inputs",
        )


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the samples of several batches, which must have the same inputs, as one batch.

    Either all batches or none must have ``lengths``. With ``lengths``, texts are padded on the
    right: labels with ``IGNORED``, and inputs with 0, which is a token of every vocabulary and
    means padding in an attention mask.
    """
    first = batches[0]
    longest = None if first.lengths is None else max(batch.labels.shape[1] for batch in batches)
    each = [dict(batch.tensors()) for batch in batches]
    for name in each[0] if longest is None else ():
        shapes = {tuple(tensors[name].shape[1:]) for tensors in each}
        if len(shapes) > 1:
            raise InputError(
                f"All samples must have the same shapes. Found different shapes of {name}: "
                f"{listed(sorted(shapes))}. {ONE_SHAPE}",
                code="gradients.different_shapes",
            )
    inputs = {
        name: _padded_cat([x[name] for x in each], longest if name in first.token_inputs else None)
        for name in each[0]
    }
    labels = _padded_cat([batch.labels for batch in batches], longest, IGNORED)
    lengths = [batch.lengths for batch in batches if batch.lengths is not None]
    return first.with_inputs(inputs, labels, torch.cat(lengths) if lengths else None)


def _padded_cat(tensors: Sequence[Tensor], longest: int | None, filling: int = 0) -> Tensor:
    """Concatenate tensors, shape (samples, ...). Pad dimension 1 to ``longest`` if it is given."""
    if longest is not None:
        # With a negative margin, ``pad`` would cut a tensor that is too long. Instead, ``cat`` or
        # the model must raise an error.
        margins = [(0, 0) * (x.ndim - 2) + (0, max(0, longest - x.shape[1])) for x in tensors]
        tensors = [pad(x, at, value=filling) for x, at in zip(tensors, margins, strict=True)]
    return torch.cat(list(tensors))


@dataclass(frozen=True, slots=True)
class Shapes:
    """The properties of several samples' shapes that are needed to pad and join the samples."""

    lengths: list[int]  # number of tokens of each text; empty if samples are not texts
    token_inputs: frozenset[str]  # names of the inputs that have one row for each label
    # The largest length of each input whose length differs between samples and doesn't depend on
    # the number of labels, such as the input of an encoder.
    encoder_lengths: Mapping[str, int]

    @property
    def differ(self) -> bool:
        """Whether texts differ in length, so that they must be padded."""
        return len(set(self.lengths)) > 1 or bool(self.encoder_lengths)


def shapes_of(samples: Iterable[tuple[object, Batch]], output: ModelOutput) -> Shapes:
    """Return the lengths of samples, or raise an error that names two samples whose shapes differ.

    ``samples`` are pairs of an id and a batch of one sample. Texts, which have one label for each
    token, may differ in the number of tokens. This number is the first dimension of the labels and
    of inputs with one row for each token. If the model is also called with the labels, its named
    inputs may differ from them in length. All other shapes must be equal.
    """
    first: dict[str, tuple[int, ...]] = {}
    first_id: object = None
    lengths: list[int] = []
    same: set[str] = set()
    token_inputs: set[str] = set()
    longest: dict[str, int] = {}
    for sample_id, sample in samples:
        label = tuple(sample.labels.shape[1:])
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in sample.tensors()}
        shapes["labels"] = label
        is_text = output.label_ndim == 1 == len(label)
        if is_text:
            lengths.append(label[0])
        if not first:
            first, first_id, same, token_inputs = shapes, sample_id, set(shapes), set(shapes)
        if shapes.keys() != first.keys():
            raise InputError(
                "Samples must be tuples of the same length, or dicts with the same keys. Found "
                f"{', '.join(first)} in sample {first_id}, but {', '.join(shapes)} in sample "
                f"{sample_id}.",
                code="gradients.different_inputs",
            )
        for name, shape in shapes.items():
            is_like_first = shape[1:] == first[name][1:]
            if shape != first[name]:
                same.discard(name)
            if not (is_text and is_like_first and shape[:1] == label):
                token_inputs.discard(name)
            if output.takes_labels and name in sample.kwargs and shape and is_like_first:
                longest[name] = max(longest.get(name, 0), shape[0])
            if name not in same | token_inputs | longest.keys():
                raise _different_shapes(name, {first_id: first, sample_id: shapes}, output)
    encoder_lengths = {name: n for name, n in longest.items() if name not in same | token_inputs}
    return Shapes(lengths, frozenset(token_inputs - {"labels"}), encoder_lengths)


def _different_shapes(
    name: str, samples: Mapping[object, dict[str, tuple[int, ...]]], output: ModelOutput
) -> InputError:
    exception = mention = ""
    if output.label_ndim == 1:
        exception = (
            ". Only the number of tokens may differ, which is the first dimension of `labels` and "
            "of each input with one row for each token"
        )
        mention = ", which has labels of shape {labels}"
    pair = "; ".join(
        f"{shapes[name]} in sample {sample_id}{mention.format(**shapes)}"
        for sample_id, shapes in samples.items()
    )
    return InputError(
        f"All samples must have the same shapes{exception}. Found different shapes of {name}: "
        f"{pair}. {ONE_SHAPE}",
        code="gradients.different_shapes",
    )


_DIFFERENTIATES = (
    "A `forward` that differentiates must use `with torch.enable_grad():` and `create_graph=True`, "
    "because the model is also called without a graph."
)
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


@contextmanager
def naming_sample(
    model: nn.Module, batch: Batch, ids: Sequence[object]
) -> Generator[None, None, None]:
    """If code in this context fails because of a sample, raise an error that names the sample.

    The sample is found by calling the model with one sample at a time. If no call fails, the
    original error is raised.
    """
    try:
        yield
    except (IndexError, KeyError, TypeError, AttributeError):
        with torch.no_grad():
            for i, sample_id in enumerate(ids):
                call(model, batch.rows(slice(i, i + 1)), f"sample {sample_id}")
        raise


def call(model: nn.Module, batch: Batch, batch_name: str = "") -> object:
    """Return the result of the model for a batch.

    If the call fails, raise an ``InputError`` that describes the inputs and quotes the line of the
    user's code that failed. ``batch_name`` is used for the batch in this message.
    """
    try:
        return batch.given_to(model)
    except (RuntimeError, TypeError, IndexError, KeyError, AttributeError, ValueError) as error:
        _explain_missing_decoder(model, batch, error)
        inputs = ", ".join(
            f"{f'{name} ' if batch.kwargs else ''}{tuple(tensor.shape)} {_short(tensor.dtype)}"
            for name, tensor in batch.tensors()
        )
        own = ", ".join(sorted({_short(p.dtype) for p in model.parameters()})) or "none"
        has_no_graph = "does not require grad" in str(error)
        raise InputError(
            "The model must accept its samples. It was called with "
            f"{batch_name or ('one sample' if len(batch) == 1 else f'{len(batch)} samples')} of "
            f"{inputs}, and its parameters have the dtype {own}. Found {type(error).__name__}: "
            f"{first_line(error)}{_last_line(error)}\n"
            f"{_DIFFERENTIATES if has_no_graph else CHANGE_SAMPLES}",
            code="gradients.model_call",
        ) from error


def _explain_missing_decoder(model: nn.Module, batch: Batch, error: Exception) -> None:
    """Raise an error if an encoder-decoder model failed because it got no decoder inputs."""
    takes = inspect.signature(model.forward).parameters
    has_inputs = any(name.startswith("decoder_") for name in batch.kwargs)
    if "decoder_input_ids" in takes and not has_inputs and not batch.gives_labels:
        raise InputError(
            "An encoder-decoder model must get inputs for its decoder. It gets only "
            f"{', '.join(batch.kwargs) or 'positional inputs'}. Set model_output to "
            "sequence_to_sequence. The model then computes the decoder's inputs from `labels`.",
            code="gradients.no_decoder_inputs",
        ) from error


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _last_line(error: BaseException) -> str:
    """Return the line where the user's code failed, or else where another library's code failed."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [f for f in frames if not f.filename.startswith((_OURS, _TORCH, "<"))]
    if not others:
        return ""
    frame = ([f for f in others if not f.filename.startswith(_INSTALLED)] or others)[-1]
    return f"\nin {frame.filename}:{frame.lineno}, {frame.name}: {frame.line}"


# Machine epsilon of TF32, which has a mantissa of 10 bits. With ``precision: high`` in the config,
# GPUs round the factors of float32 matrix products to TF32.
_TF32 = 2.0**-10


def call_with_rounding(model: nn.Module, batch: Batch) -> tuple[object, float]:
    """Return the result of the model for a batch, and a bound for the relative rounding error.

    The bound is sqrt(eps), where eps is the largest machine epsilon of the parameters and of the
    tensors that layers return, which have lower precision than the parameters under autocast.
    Rounding errors are far smaller than the bound, and errors of a wrong computation far larger.
    """
    epsilons: list[float] = []

    def note(module: nn.Module, args: Any, result: Any) -> None:
        epsilons.extend(torch.finfo(tensor.dtype).eps for tensor in _floats(result))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        returned = call(model, batch)
    return returned, max(least_rounding(model), math.sqrt(max(epsilons, default=0)))


def least_rounding(model: nn.Module) -> float:
    """Return the bound of ``call_with_rounding`` for a model that doesn't use autocast."""
    parameters = list(model.parameters())
    epsilons = [torch.finfo(p.dtype).eps for p in _floats(parameters)]
    if any(p.is_cuda for p in parameters):
        epsilons.append(_TF32)
    return math.sqrt(max(epsilons, default=0))


def _floats(tree: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
