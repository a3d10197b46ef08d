"""Project gradients on a GPU with kernels that numba compiles.

Only jobs on a GPU import this package. The kind of projection and the GPU's compute capability
determine the kernel:

======================= =============================== ============================================
kind of projection      capability 8.0 and later        7.0 and 7.5
======================= =============================== ============================================
``rademacher``          ``tensor_core``                 ``portable``
``normal``              ``portable``, as 16-bit numbers ``portable``
                        would round R
``hadamard``            ``hadamard``                    ``hadamard``
======================= =============================== ============================================

``tensor_sketch`` has no kernel. ``projection/tensor_sketch.py`` computes it with torch.

The tensor-core kernel uses the instruction mma.sync on every GPU. On an H200, it reaches 0.42 to
0.48 of the rate of a float16 matrix product. Hopper's instruction wgmma should be faster for 32 or
more rows. It is not used, because it runs asynchronously and reads operands by descriptors. Tests
without a GPU could not detect errors in code that uses it.
"""

from trak_core.projection.cuda.project import project_cuda

__all__ = ["project_cuda"]
