"""The projection on a GPU, in kernels that numba compiles; imported only where one is used.

======================= =============================== ============================================
kind                    capability 8.0 and later        7.0 and 7.5
======================= =============================== ============================================
``rademacher``          ``tensor_core``                 ``portable``
``normal``              ``portable`` (a 16-bit operand  ``portable``
                        would round R)
``hadamard``            ``hadamard``                    ``hadamard``
======================= =============================== ============================================

``tensor_sketch`` needs none: ``projection/tensor_sketch.py`` does it with torch.

The tensor-core kernel multiplies with mma.sync on every GPU. Hopper's own wgmma, which should be
faster from 32 rows on, is left out on purpose: its descriptors and its asynchrony show their
mistakes on a GPU alone, and one was at hand for minutes. On an H200 mma.sync reaches .42 to .48 of
what a float16 product does.
"""

from trak_core.projection.cuda.project import project_cuda

__all__ = ["project_cuda"]
