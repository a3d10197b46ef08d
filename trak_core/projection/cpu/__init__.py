"""The projection on a CPU: one kernel a kind, all of them over the same slices of coordinates."""

from trak_core.projection.cpu.project import project_cpu

__all__ = ["project_cpu"]
