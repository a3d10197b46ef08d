"""Projection on a CPU: one kernel for each kind, applied to fixed slices of coordinates."""

from trak_core.projection.cpu.project import project_cpu

__all__ = ["project_cpu"]
