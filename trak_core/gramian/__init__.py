"""Inner products of gradients, exactly and without the gradients."""

from trak_core.gramian.engine import Engine

__all__ = ["Engine"]
