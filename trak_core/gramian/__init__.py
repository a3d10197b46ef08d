"""Compute exact inner products of gradients without forming the gradients."""

from trak_core.gramian.jacobian_gramian import Engine, cross_gramian, train_gramian

__all__ = ["Engine", "cross_gramian", "train_gramian"]
