"""The projection on a GPU, in kernels that numba compiles; imported only where one is used."""

from trak_core.projection.cuda._project import project_cuda

__all__ = ["project_cuda"]
