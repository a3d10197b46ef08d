"""Frozen descriptions of what to compute; they hold no arrays and import no backend."""

import hashlib
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from trak_core.errors import InputError


class ProjectionKind(StrEnum):
    """Distribution of the entries of the projection matrix, before scaling."""

    RADEMACHER = "rademacher"


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

    Entry R[g, j] is a function of (kind, seed, stream, g, j) alone; ``n_params`` only says where
    the matrix ends. ``version`` names the definition of the entries.

    Attributes:
        kind: Distribution of the entries.
        n_params: Rows of R, the size p of a flattened gradient; below 2^56.
        proj_dim: Columns of R, the size k of a projected gradient.
        seed: The user's seed, unsigned 64 bit.
        stream: Separates matrices of one seed, unsigned 32 bit; see ``stream_of``.
        version: Version of the definition; 1 is the only one.

    Raises:
        InputError: If a field is out of its range.
    """

    kind: ProjectionKind
    n_params: int
    proj_dim: int
    seed: int
    stream: int
    version: int = 1

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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return {**asdict(self), "kind": str(self.kind)}


def stream_of(checkpoint: str) -> int:
    """Return the projection stream of a checkpoint: the 32-bit blake2b of its id.

    The id alone decides, so that adding or removing other checkpoints changes no matrix.
    """
    return int.from_bytes(hashlib.blake2b(checkpoint.encode(), digest_size=4).digest(), "little")
