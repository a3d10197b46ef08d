"""Random projection of gradient rows (Johnson-Lindenstrauss), one matrix everywhere."""

from trak_core.projection._project import project

__all__ = ["project"]
