"""Samples of a batch must have the same shapes; texts may differ in their number of tokens."""

from collections.abc import Iterable
from dataclasses import dataclass

from trak_core.errors import InputError
from trak_core.gradients._batch import Batch
from trak_core.model_outputs.model_output import ModelOutput


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the shapes of some samples have in common.

    Attributes:
        lengths: The number of tokens of each text; empty where a label is not one a token.
        along: Names of the inputs that have as many rows in each of the samples.
    """

    lengths: list[int]
    along: frozenset[str]

    @property
    def differ(self) -> bool:
        """Whether texts differ in length, so that they have to be padded."""
        return len(set(self.lengths)) > 1


def shapes_of(samples: Iterable[tuple[object, Batch]], output: ModelOutput) -> Shapes:
    """Compare the shapes of samples, one after another.

    Texts, samples with a label a token, may differ in the first dimension of their labels and of
    all inputs that have as many rows: those can be padded. Whatever else must be the same.

    Args:
        samples: Each with its id, as a batch of one.
        output: The model output.

    Returns:
        The texts' lengths, and which inputs go with them.

    Raises:
        InputError: If samples have other inputs, or shapes that no padding makes the same; it names
            two of them.
    """
    first: dict[str, tuple[int, ...]] = {}
    first_id: object = None
    lengths: list[int] = []
    same: set[str] = set()
    along: set[str] = set()
    for sample_id, sample in samples:
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in sample.tensors()}
        label = tuple(sample.labels.shape[1:])
        is_text = output.label_ndim == 1 == len(label)
        if is_text:
            lengths.append(label[0])
        shapes["labels"] = label
        if not first:
            first, first_id = shapes, sample_id
            same = set(first)
            along = {name for name in first if is_text}
        if shapes.keys() != first.keys():
            raise InputError(
                "Samples must be tuples of one length, or dicts with the same keys. Found "
                f"{', '.join(first)} in sample {first_id}, {', '.join(shapes)} in sample "
                f"{sample_id}.",
                code="gradients.different_inputs",
            )
        same -= {name for name, shape in shapes.items() if shape != first[name]}
        along -= {
            name
            for name, shape in shapes.items()
            if not is_text or shape[:1] != label or shape[1:] != first[name][1:]
        }
        odd = [name for name in shapes if name not in same | along]
        if odd:
            _refuse(odd[0], (first_id, first), (sample_id, shapes), output)
    return Shapes(lengths, frozenset(along - {"labels"}))


def _refuse(
    name: str,
    one: tuple[object, dict[str, tuple[int, ...]]],
    other: tuple[object, dict[str, tuple[int, ...]]],
    output: ModelOutput,
) -> None:
    found = [
        f"{shapes[name]} in sample {sample_id}"
        + (f", which has labels of shape {shapes['labels']}" if output.label_ndim == 1 else "")
        for sample_id, shapes in (one, other)
    ]
    may_differ = (
        "the same shapes in every sample but for the number of tokens, the first dimension of "
        "`labels` and of each input with a row a token"
        if output.label_ndim == 1
        else "the same shapes in every sample"
    )
    raise InputError(
        f"Samples must have {may_differ}. Found for {name}: {'; '.join(found)}. Bring them to one "
        "shape.",
        code="gradients.different_shapes",
    )
