"""Projections: the table of kinds, and what fully determines one matrix; no arrays, no backend."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from trak_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Properties of a kind of projection; ``projection/reference.py`` defines its entries.

    Attributes:
        tag: Its number in the counter of random words, its own forever; None if nothing is random.
        nested: Whether the first k columns of a wider matrix are the k-column matrix.
        power_of_two: Whether proj_dim must be one.
        of_matrices: Whether entries follow from rows and columns of each parameter as a matrix, so
            that the spec says the parameters' shapes; a row of R has a single entry then, +-1.
    """

    tag: int | None
    nested: bool = False
    power_of_two: bool = False
    of_matrices: bool = False


class ProjectionKind(StrEnum):
    """The kinds of projection, one row each; CONTRIBUTING.md says what a new one needs."""

    about: Kind

    RADEMACHER = "rademacher", Kind(tag=0, nested=True)
    NORMAL = "normal", Kind(tag=1, nested=True)
    HADAMARD = "hadamard", Kind(tag=3, power_of_two=True)
    TENSOR_SKETCH = "tensor_sketch", Kind(tag=4, of_matrices=True)
    IDENTITY = "identity", Kind(tag=None)

    def __new__(cls, name: str, about: Kind) -> Self:
        """Make a kind that is its name, with its row beside it."""
        kind = str.__new__(cls, name)
        kind._value_, kind.about = name, about
        return kind

    @property
    def tag(self) -> int:
        """The kind's number in the counter of random words."""
        assert self.about.tag is not None
        return self.about.tag


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """One projection matrix R of shape (n_params, proj_dim), fully determined by these fields.

    Entry R[g, j] is a function of (kind, seed, stream, g, j) alone, for kinds that aren't nested of
    proj_dim and shapes too; ``n_params`` only says where the matrix ends. ``version`` names the
    definition of the entries.

    Attributes:
        kind: How the entries come about.
        n_params: Rows of R, the size p of a flattened gradient; below 2^56.
        proj_dim: Columns of R, the size k of a projected gradient; a power of two for ``hadamard``,
            equal to n_params for ``identity``.
        seed: The user's seed, unsigned 64 bit.
        stream: Separates matrices of one seed, unsigned 32 bit; see ``stream_of``.
        version: Version of the definition; 1 is the only one.
        shapes: For ``tensor_sketch`` the parameters as matrices, one after the other; None for the
            other kinds. See ``matrix_shape``.

    Raises:
        InputError: If a field is out of its range.

    Example:
        >>> from trak_core.spec import ProjectionSpec, stream_of
        >>> spec = ProjectionSpec(
        ...     kind="rademacher", n_params=38_282, proj_dim=512, seed=0, stream=stream_of("c0")
        ... )
        >>> spec.is_nested, round(spec.scale, 4)
        (True, 0.0442)
        >>> ProjectionSpec(**spec.as_dict()) == spec
        True
    """

    kind: ProjectionKind
    n_params: int
    proj_dim: int
    seed: int
    stream: int
    version: int = 1
    shapes: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        """Check every field's range."""
        try:
            object.__setattr__(self, "kind", ProjectionKind(self.kind))
        except ValueError:
            known = ", ".join(ProjectionKind)
            raise InputError(
                f"The projection's kind must be one of: {known}. Found {self.kind!r}.",
                code="spec.kind",
            ) from None
        for field, low, high in (
            ("n_params", 1, 2**56),
            ("proj_dim", 1, 2**31),
            ("seed", 0, 2**64),
            ("stream", 0, 2**32),
            ("version", 1, 2),
        ):
            value = getattr(self, field)
            if not low <= value < high:
                raise InputError(
                    f"The projection's {field} must be at least {low} and below {high}. "
                    f"Found {value}.",
                    code="spec.range",
                )
        self._check_kind()

    def _check_kind(self) -> None:
        about = self.kind.about
        self._check_shapes()
        if about.power_of_two and self.proj_dim & (self.proj_dim - 1):
            raise InputError(
                f"proj_dim must be a power of two for the projection kind {self.kind}. "
                f"Found {self.proj_dim}.",
                code="spec.power_of_two",
            )
        if self.kind is ProjectionKind.IDENTITY and self.proj_dim != self.n_params:
            raise InputError(
                "proj_dim must equal n_params for the projection kind identity. "
                f"Found proj_dim {self.proj_dim}, n_params {self.n_params}.",
                code="spec.identity_size",
            )

    def _check_shapes(self) -> None:
        if not self.kind.about.of_matrices:
            if self.shapes is not None:
                raise InputError(
                    f"Only a projection of matrices has shapes. Found some with kind {self.kind}.",
                    code="spec.kind_without_shapes",
                )
            return
        if self.shapes is None:
            raise InputError(
                f"The projection kind {self.kind} must have the shapes of the parameters. Found "
                "none.",
                code="spec.no_shapes",
            )
        shapes = tuple((int(rows), int(columns)) for rows, columns in self.shapes)
        entries = [rows * columns for rows, columns in shapes]
        if min(entries) < 1 or sum(entries) != self.n_params:
            raise InputError(
                "The projection's shapes must be those of matrices that have its n_params entries "
                f"together. Found {sum(entries)} entries, n_params {self.n_params}.",
                code="spec.shapes",
            )
        object.__setattr__(self, "shapes", shapes)

    @property
    def is_nested(self) -> bool:
        """Whether the first k columns of a wider matrix are the k-column matrix."""
        return self.kind.about.nested

    @property
    def scale(self) -> float:
        """The factor that makes E<Rx, Ry> = <x, y>: 1/sqrt(proj_dim), or 1 where R does so alone.

        That is ``identity``, and ``tensor_sketch``, of whose rows each has one entry, +-1.
        """
        is_unit = self.kind is ProjectionKind.IDENTITY or self.kind.about.of_matrices
        return 1.0 if is_unit else 1 / math.sqrt(self.proj_dim)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON; shapes if it has them."""
        shapes = None if self.shapes is None else [list(shape) for shape in self.shapes]
        own = {**asdict(self), "kind": str(self.kind), "shapes": shapes}
        return {name: value for name, value in own.items() if value is not None}

    def scaled(self) -> dict[str, Any]:
        """Return what a file of scaled features says of its projection."""
        return {**self.as_dict(), "scale": "1" if self.scale == 1 else "1/sqrt(proj_dim)"}


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's shape as that of a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


# Up to so many products of a gradient's entries and columns, a dense matrix costs a millisecond or
# two a sample and core; up to so many parameters, the fast transform costs about what a sketch by
# factors does (benchmarks/RESULTS.md).
_DENSE_PRODUCTS, _TRANSFORMED_PARAMS = 2**27, 2**24


def usual_kind(n_params: int, proj_dim: int) -> ProjectionKind:
    """Return the kind of projection to take if nobody says: the cheapest of a dense one's quality.

    That is ``rademacher`` for small models, whose columns are nested; ``hadamard`` up to 16.8
    million parameters, if ``proj_dim`` is a power of two; and ``tensor_sketch``.
    """
    if n_params * proj_dim <= _DENSE_PRODUCTS:
        return ProjectionKind.RADEMACHER
    if n_params <= _TRANSFORMED_PARAMS and not proj_dim & (proj_dim - 1):
        return ProjectionKind.HADAMARD
    return ProjectionKind.TENSOR_SKETCH


def stream_of(checkpoint: str) -> int:
    """Return the projection stream of a checkpoint: the 32-bit blake2b of its id.

    The id alone decides, so that adding or removing other checkpoints changes no matrix.
    """
    return int.from_bytes(hashlib.blake2b(checkpoint.encode(), digest_size=4).digest(), "little")
