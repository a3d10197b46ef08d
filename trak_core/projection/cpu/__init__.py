"""Projection on a CPU. Each kind has a kernel, which is applied to fixed slices of coordinates."""

from trak_core.projection.cpu.project import project_cpu

__all__ = ["project_cpu"]
