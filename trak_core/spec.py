"""Frozen descriptions of what to compute; they hold no arrays and import no backend."""

import hashlib
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from trak_core.errors import InputError

# What a config says in place of a projection, and what files made without one say.
EXACT = "exact"
EXACT_PROJECTION = {"kind": EXACT}


class ProjectionKind(StrEnum):
    """How the entries of the projection matrix come about (``projection/reference.py``)."""

    RADEMACHER = "rademacher"
    NORMAL = "normal"
    HADAMARD = "hadamard"
    SJLT = "sjlt"
    NONE = "none"


class Weighting(StrEnum):
    """Diagonal W of the normal matrix: 1, or the curvature of the loss in the model output."""

    PLAIN = "plain"
    CURVATURE = "curvature"


class Combine(StrEnum):
    """How checkpoints and loss weights come together (spec of the scores, "The formula")."""

    PRODUCT_OF_AVERAGES = "product_of_averages"
    AVERAGE_OF_PRODUCTS = "average_of_products"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionSpec:
    """One projection matrix R of shape (n_params, proj_dim), fully determined by these fields.

    Entry R[g, j] is a function of (kind, seed, stream, g, j) alone, for ``hadamard`` and ``sjlt``
    of proj_dim and stripes too; ``n_params`` only says where the matrix ends. ``version`` names the
    definition of the entries.

    Attributes:
        kind: How the entries come about.
        n_params: Rows of R, the size p of a flattened gradient; below 2^56.
        proj_dim: Columns of R, the size k of a projected gradient; a power of two for ``hadamard``,
            equal to n_params for ``none``.
        seed: The user's seed, unsigned 64 bit.
        stream: Separates matrices of one seed, unsigned 32 bit; see ``stream_of``.
        version: Version of the definition; 1 is the only one.
        stripes: Entries a row of ``sjlt`` has, one in each stripe of proj_dim / stripes columns; a
            divisor of proj_dim, 4 if None. None for the other kinds.

    Raises:
        InputError: If a field is out of its range.
    """

    kind: ProjectionKind
    n_params: int
    proj_dim: int
    seed: int
    stream: int
    version: int = 1
    stripes: int | None = None

    def __post_init__(self) -> None:
        """Check every field's range."""
        try:
            object.__setattr__(self, "kind", ProjectionKind(self.kind))
        except ValueError:
            known = ", ".join(ProjectionKind)
            raise InputError(
                f"The projection's kind must be one of: {known}. Found {self.kind!r}."
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
                    f"Found {value}."
                )
        self._check_kind()

    def _check_kind(self) -> None:
        """Check what one kind asks of the sizes."""
        if self.kind is ProjectionKind.SJLT:
            stripes = 4 if self.stripes is None else self.stripes
            if stripes < 1 or self.proj_dim % stripes:
                raise InputError(
                    "The projection's stripes must divide its proj_dim. "
                    f"Found stripes {stripes}, proj_dim {self.proj_dim}."
                )
            object.__setattr__(self, "stripes", stripes)
        elif self.stripes is not None:
            raise InputError(
                "Only the projection kind sjlt has stripes. "
                f"Found stripes {self.stripes} with kind {self.kind}."
            )
        if self.kind is ProjectionKind.HADAMARD and self.proj_dim & (self.proj_dim - 1):
            raise InputError(
                "proj_dim must be a power of two for the projection kind hadamard. "
                f"Found {self.proj_dim}."
            )
        if self.kind is ProjectionKind.NONE and self.proj_dim != self.n_params:
            raise InputError(
                "proj_dim must equal n_params for the projection kind none. "
                f"Found proj_dim {self.proj_dim}, n_params {self.n_params}."
            )

    @property
    def is_nested(self) -> bool:
        """Whether the first k columns of a wider matrix are the k-column matrix."""
        return self.kind in {ProjectionKind.RADEMACHER, ProjectionKind.NORMAL}

    @property
    def entry_factor(self) -> float:
        """What multiplies the sums of +-x: sqrt(proj_dim / stripes), and 1 without stripes."""
        return 1.0 if self.stripes is None else math.sqrt(self.proj_dim / self.stripes)

    @property
    def scale(self) -> float:
        """The factor that makes E<Rx, Ry> = <x, y>: 1/sqrt(proj_dim), and 1 for ``none``."""
        return 1.0 if self.kind is ProjectionKind.NONE else 1 / math.sqrt(self.proj_dim)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON; ``stripes`` where there are any."""
        fields = {**asdict(self), "kind": str(self.kind)}
        if self.stripes is None:
            del fields["stripes"]
        return fields


def stream_of(checkpoint: str) -> int:
    """Return the projection stream of a checkpoint: the 32-bit blake2b of its id.

    The id alone decides, so that adding or removing other checkpoints changes no matrix.
    """
    return int.from_bytes(hashlib.blake2b(checkpoint.encode(), digest_size=4).digest(), "little")
