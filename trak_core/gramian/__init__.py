"""Compute exact inner products of gradients without forming the gradients."""

from trak_core.gramian.jacobian_gramian import Engine

__all__ = ["Engine"]
