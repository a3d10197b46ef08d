"""Projections of every kind, and gradients for them."""

from math import isqrt

import numpy as np

from trak_core.settings import ProjectionKind, ProjectionSpec, matrix_shape

KINDS = [str(kind) for kind in ProjectionKind if kind.about.tag is not None]
SEED = (5 << 32) + 77


def spec_of(kind, n_params, proj_dim, seed=SEED, stream=9):
    """A projection; ``proj_dim`` is taken down to what the kind can have."""
    about = ProjectionKind(kind).about
    if about.power_of_two:
        proj_dim = 1 << (proj_dim.bit_length() - 1)
    elif kind == "identity":
        proj_dim = n_params
    return spec_with(shapes_of(n_params), proj_dim, kind, seed, stream)


def spec_with(shapes, proj_dim, kind="tensor_sketch", seed=3, stream=5):
    """A projection of parameters with these shapes, which only some kinds depend on."""
    return ProjectionSpec(
        kind=kind,
        n_params=sum(n0 * n1 for n0, n1 in shapes),
        proj_dim=proj_dim,
        seed=seed,
        stream=stream,
        shapes=shapes if ProjectionKind(kind).about.of_matrices else None,
    )


def spec_for(parameters, proj_dim, kind):
    """A projection of the parameters of a model, a mapping."""
    return spec_with([matrix_shape(p.shape) for p in parameters.values()], proj_dim, kind)


def shapes_of(n_params):
    """Parameters of so many entries together: a square matrix, and a vector for the rest."""
    side = isqrt(n_params)
    beyond = n_params - side**2
    return [(side, side), (beyond, 1)] if beyond else [(side, side)]


def real_gradients(n_samples, n_params):
    return np.random.default_rng(1).standard_normal((n_samples, n_params)).astype(np.float32)
