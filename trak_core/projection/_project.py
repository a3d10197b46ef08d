"""The public door of the projection: checks its arguments, then calls the backend."""

import numpy as np

from trak_core.errors import InputError
from trak_core.projection.cpu import project_rademacher_cpu
from trak_core.spec import ProjectionSpec


def project(
    gradients: np.ndarray,
    spec: ProjectionSpec,
    *,
    offset: int = 0,
    out: np.ndarray | None = None,
    accumulate: bool = False,
    scale: bool = False,
    threads: int = 1,
) -> np.ndarray:
    r"""Project each row of ``gradients`` to ``spec.proj_dim`` dimensions.

    Computes :math:`Y = X R[o : o + n]`, with R of entries +1 and -1, each a function of
    ``(spec.kind, spec.seed, spec.stream, row, column)`` alone: the matrix does not depend on the
    machine, on the batch, on how the coordinates are cut into chunks, or on ``spec.proj_dim`` (the
    first k columns of a wider matrix are the k-column matrix). Y is equal to the rounding of its
    float32 sums. The gradient of a model may come in parts, one call a part with
    ``accumulate=True``: nothing needs to be concatenated.

    Args:
        gradients: Shape (n_samples, n), float32; n = spec.n_params, or less for a part.
        spec: The projection to apply.
        offset: Row of R that belongs to the first column of ``gradients``.
        out: Where the result goes, shape (n_samples, spec.proj_dim), float32; made if None.
        accumulate: Add to ``out`` instead of overwriting it.
        scale: Multiply ``out`` by 1/sqrt(spec.proj_dim) at the end, what was in it before
            included, so that E<Rx, Ry> = <x, y>.
        threads: How many threads make R; the result does not depend on it.

    Returns:
        ``out``, shape (n_samples, spec.proj_dim), float32.

    Raises:
        InputError: If shapes or dtypes are not as above, if the part does not lie within
            ``spec.n_params``, or if ``accumulate`` comes without ``out``.

    Source:
        Park et al., "TRAK: Attributing Model Behavior at Scale", ICML 2023, section 3.2.
        Achlioptas, "Database-friendly random projections", JCSS 2003 (entries of one bit).
    """
    if gradients.ndim != 2 or gradients.dtype != np.float32:
        raise InputError(
            "`gradients` must be a float32 matrix with one row a sample. "
            f"Found shape {gradients.shape}, dtype {gradients.dtype}."
        )
    n_samples, n_columns = gradients.shape
    if offset < 0 or offset + n_columns > spec.n_params:
        raise InputError(
            f"`gradients` must lie within the projection's {spec.n_params} rows. Found columns "
            f"{offset} to {offset + n_columns}."
        )
    shape = (n_samples, spec.proj_dim)
    if out is None:
        if accumulate:
            raise InputError("`accumulate=True` needs an `out` to add to. Found out=None.")
        out = np.zeros(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32:
        raise InputError(
            f"`out` must be float32 of shape {shape}. Found {out.dtype} of shape {out.shape}."
        )
    elif not accumulate:
        out[:] = 0
    project_rademacher_cpu(gradients, spec.seed, spec.stream, offset, threads, out)
    if scale:
        out *= np.float32(1 / np.sqrt(spec.proj_dim))
    return out
