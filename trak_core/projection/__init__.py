"""Random projection of gradient rows (Johnson-Lindenstrauss), one matrix everywhere."""

from trak_core.projection._project import NotFiniteError, project

__all__ = ["NotFiniteError", "project"]
