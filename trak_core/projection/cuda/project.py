"""Project on a GPU, once kernels can run there and are known to make the right matrix."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trak_core.projection.cuda.availability import is_simulated, require_numba_cuda
from trak_core.spec import ProjectionSpec


@contextmanager
def _on(device: torch.device) -> Generator[None]:
    """Make a GPU the current one of both PyTorch and numba."""
    if is_simulated():
        yield
        return
    from trak_core.projection.cuda.device_functions import cuda

    with torch.cuda.device(device), cuda.gpus[torch.cuda.current_device()]:
        yield


def project_cuda(blocks: Sequence[Any], spec: ProjectionSpec, offset: int, out: Tensor) -> None:
    """Add the unscaled projection of the gradient blocks to ``out``.

    Computes out += X R[offset : offset + n], X being the blocks side by side, with the matrix of
    ``reference.py`` bit for bit; the kernel that makes it here is compared with the definition
    before its first use. Sums are float32 (on tensor cores, float32 gradients count as the sum of
    two bfloat16 numbers, within 2^-18; infinities and NaN stay not finite). The same device gives
    the same bits, whatever the blocks and the batch are; several calls for chunks that end at
    multiples of 65536 give what one call gives, for ``sjlt`` to the rounding of its factor. Work is
    queued on PyTorch's current stream; memory beyond the arguments stays below 256 MiB. Nothing is
    copied of blocks that a kernel can read in place.

    Args:
        blocks: Matrices (n_samples, n_i) of one dtype, float32, float16 or bfloat16, the first
            beginning at coordinate ``offset``, each following right after the last. CUDA tensors;
            CPU tensors under numba's simulator. Rows may be strided.
        spec: The projection; not of kind ``identity``.
        offset: Coordinate of the first column.
        out: Shape (n_samples, spec.proj_dim), float32, on the same device; may be strided.

    Raises:
        InputError: If numba-cuda, a driver or a capable GPU is missing, if ``proj_dim`` is too
            large for the kind, or if the kernel does not make the right matrix on this GPU.
    """
    require_numba_cuda()
    # Only now: they need what was just looked for.
    from trak_core.projection.cuda.choose_kernel import choose, require_right_matrix
    from trak_core.projection.cuda.project_slices import project_slices

    blocks = [block.detach() for block in blocks if block.shape[1]]
    if not blocks or not len(out):
        return
    with _on(out.device), torch.no_grad():
        dtype = blocks[0].dtype
        method = choose(spec, dtype, out.device)
        require_right_matrix(method, spec, dtype, out.device, len(out))
        project_slices(blocks, spec, offset, out.detach(), method)
