"""Project gradients by a random matrix (Johnson-Lindenstrauss) that is the same on all devices."""

from trak_core.projection.project import add_projection, back_project, project
from trak_core.projection.tensor_sketch import (
    Contractions,
    OuterProducts,
    add_rows,
    prefers_factors,
)

__all__ = ["Contractions", "OuterProducts", "add_projection", "back_project"]
__all__ += ["add_rows", "prefers_factors", "project"]
