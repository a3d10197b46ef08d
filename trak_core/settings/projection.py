"""The kinds of projection, and the settings that determine a projection matrix."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from trak_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The properties of a kind of projection matrix R.

    Attributes:
        tag: A number that identifies the kind in the counter of the random number generator Philox
            (``projection/reference.py``). It must never be used for another kind. None if R is not
            random.
        nested: Whether the first k columns of a wider matrix equal the matrix with k columns.
        power_of_two: Whether proj_dim must be a power of two.
        of_matrices: Whether R depends on the shapes of the parameters, which are treated as
            matrices. Each row of R then has one nonzero entry, +1 or -1.
    """

    tag: int | None
    nested: bool = False
    power_of_two: bool = False
    of_matrices: bool = False


class ProjectionKind(StrEnum):
    """The kinds of projection. CONTRIBUTING.md describes how to add one."""

    about: Kind

    RADEMACHER = "rademacher", Kind(tag=0, nested=True)
    NORMAL = "normal", Kind(tag=1, nested=True)
    HADAMARD = "hadamard", Kind(tag=3, power_of_two=True)
    TENSOR_SKETCH = "tensor_sketch", Kind(tag=4, of_matrices=True)
    IDENTITY = "identity", Kind(tag=None)

    def __new__(cls, name: str, about: Kind) -> Self:
        kind = str.__new__(cls, name)
        kind._value_, kind.about = name, about
        return kind

    @property
    def tag(self) -> int:
        """The number that identifies the kind in the counter of the generator Philox."""
        assert self.about.tag is not None
        return self.about.tag


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """The settings that fully determine a projection matrix R of shape (n_params, proj_dim).

    Entry R[g, j] is a function of kind, seed, stream, g and j. Unless ``is_nested``, the entry also
    depends on proj_dim and shapes. ``n_params`` determines only the number of rows.

    Attributes:
        kind: The kind of projection, which defines how entries are computed.
        n_params: Number of rows, which is the length of a flattened gradient. It must be below
            2^56.
        proj_dim: Number of columns, which is the length of a projected gradient. It must be a power
            of two for ``hadamard``, and equal to n_params for ``identity``.
        seed: The seed in the config, an unsigned 64-bit integer.
        stream: An unsigned 32-bit integer that ``stream_of`` derives from the checkpoint's id, so
            that checkpoints with the same seed have different matrices.
        version: Version of the definition of R. Only version 1 exists.
        shapes: The shapes of the parameters as matrices (``matrix_shape``), in order, for
            ``tensor_sketch``. None for other kinds.

    Raises:
        InputError: If a field is out of its range.

    Example:
        >>> from trak_core.settings import ProjectionSpec, stream_of
        >>> stream = stream_of("c0")
        >>> spec = ProjectionSpec(kind="normal", n_params=38, proj_dim=16, seed=0, stream=stream)
        >>> spec.is_nested, spec.scale
        (True, 0.25)
    """

    kind: ProjectionKind
    n_params: int
    proj_dim: int
    seed: int
    stream: int
    version: int = 1
    shapes: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if self.kind not in list(ProjectionKind):
            raise InputError(
                f"The projection's kind must be one of: {', '.join(ProjectionKind)}. "
                f"Found {self.kind!r}.",
                code="spec.kind",
            )
        object.__setattr__(self, "kind", ProjectionKind(self.kind))
        ranges = {"n_params": (1, 2**56), "proj_dim": (1, 2**31), "seed": (0, 2**64)}
        ranges |= {"stream": (0, 2**32), "version": (1, 2)}
        for field, (low, high) in ranges.items():
            if not low <= (value := getattr(self, field)) < high:
                raise InputError(
                    f"The projection's {field} must be at least {low} and below {high}. "
                    f"Found {value}.",
                    code="spec.range",
                )
        self._check_shapes()
        if self.kind.about.power_of_two and self.proj_dim & (self.proj_dim - 1):
            raise InputError(
                f"proj_dim must be a power of two for the projection kind {self.kind}. "
                f"Found {self.proj_dim}.",
                code="spec.power_of_two",
            )
        if self.kind is ProjectionKind.IDENTITY and self.proj_dim != self.n_params:
            raise InputError(
                "proj_dim must equal n_params for the projection kind identity. "
                f"Found proj_dim {self.proj_dim} and n_params {self.n_params}.",
                code="spec.identity_size",
            )

    def _check_shapes(self) -> None:
        if self.shapes is None and self.kind.about.of_matrices:
            raise InputError(
                f"The projection kind {self.kind} needs the `shapes` of parameters. Found None.",
                code="spec.no_shapes",
            )
        if self.shapes is None:
            return
        if not self.kind.about.of_matrices:
            raise InputError(
                f"`shapes` must be None for the projection kind {self.kind}. Found {self.shapes}.",
                code="spec.kind_without_shapes",
            )
        shapes = tuple((int(rows), int(columns)) for rows, columns in self.shapes)
        entries = [rows * columns for rows, columns in shapes]
        if min(entries) < 1 or sum(entries) != self.n_params:
            raise InputError(
                "The projection's shapes must have n_params entries in total, and no shape may be "
                f"empty. Found {sum(entries)} entries, and n_params is {self.n_params}.",
                code="spec.shapes",
            )
        object.__setattr__(self, "shapes", shapes)

    @property
    def is_nested(self) -> bool:
        """Whether the first k columns of a wider matrix equal the matrix with k columns."""
        return self.kind.about.nested

    @property
    def scale(self) -> float:
        """The factor by which R is multiplied so that inner products are preserved on average.

        It is 1 for ``identity`` and ``tensor_sketch``, and 1/sqrt(proj_dim) for the other kinds.
        """
        is_unit = self.kind is ProjectionKind.IDENTITY or self.kind.about.of_matrices
        return 1.0 if is_unit else 1 / math.sqrt(self.proj_dim)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON, without ``shapes`` if they are None."""
        values = {**asdict(self), "kind": str(self.kind)}
        shapes = values.pop("shapes")
        return values if shapes is None else {**values, "shapes": [list(s) for s in shapes]}

    def scaled(self) -> dict[str, Any]:
        """Return the fields and ``scale`` as plain values, for a file of scaled features."""
        return {**self.as_dict(), "scale": "1" if self.scale == 1 else "1/sqrt(proj_dim)"}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of a parameter as a matrix, with all dimensions but the first flattened."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


# The largest n_params * proj_dim for which a dense matrix is the default. It takes 1 to 2 ms to
# project a sample on one core.
_DENSE_PRODUCTS = 2**27
# The largest n_params for which a Hadamard transform is the default (benchmarks/RESULTS.md).
_TRANSFORMED_PARAMS = 2**24


def usual_kind(n_params: int, proj_dim: int) -> ProjectionKind:
    """Return the default kind of projection, the cheapest that is as accurate as a dense matrix.

    The default is ``rademacher`` for small models, ``hadamard`` up to 16.8 million parameters if
    ``proj_dim`` is a power of two, and ``tensor_sketch`` otherwise.
    """
    if n_params * proj_dim <= _DENSE_PRODUCTS:
        return ProjectionKind.RADEMACHER
    if n_params <= _TRANSFORMED_PARAMS and not proj_dim & (proj_dim - 1):
        return ProjectionKind.HADAMARD
    return ProjectionKind.TENSOR_SKETCH


def stream_of(checkpoint: str) -> int:
    """Return a 32-bit hash of a checkpoint's id, which makes the checkpoint's projection unique."""
    return int.from_bytes(hashlib.blake2b(checkpoint.encode(), digest_size=4).digest(), "little")
