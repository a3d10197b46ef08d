"""Random projection of gradients (Johnson-Lindenstrauss) by the same matrix on every device."""

from trak_core.projection.project import add_projection, back_project, project
from trak_core.projection.tensor_sketch import (
    Contractions,
    OuterProducts,
    add_rows,
    prefers_factors,
)

__all__ = ["Contractions", "OuterProducts", "add_projection", "back_project"]
__all__ += ["add_rows", "prefers_factors", "project"]
