"""Random projection of gradient rows (Johnson-Lindenstrauss), one matrix everywhere."""

from trak_core.projection.project import NotFiniteError, back_project, project
from trak_core.projection.tensor_sketch import OuterProducts, prefers_factors

__all__ = ["NotFiniteError", "OuterProducts", "back_project", "prefers_factors", "project"]
