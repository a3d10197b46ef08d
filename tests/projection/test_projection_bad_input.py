"""What a projection refuses, with one error that says what must hold; and gradients of no size."""

import numpy as np
import pytest
import torch
from numba import config
from projections import KINDS, real_gradients, spec_of
from refused import refused

from trak_core.projection import project
from trak_core.projection.cuda import project as project_module
from trak_core.projection.cuda import project_cuda
from trak_core.settings import ProjectionSpec


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        ({"gradients": np.zeros((2, 10))}, "gradients", ["dtype float64"]),
        ({"gradients": zeros(10)}, "gradients", ["(10,)"]),
        ({"gradients": []}, "gradients", ["an empty sequence"]),
        ({"gradients": [zeros(2, 5), zeros(3, 5)]}, "gradients", ["(2, 5)", "(3, 5)"]),
        ({"gradients": [zeros(2, 5), torch.zeros(2, 5)]}, "gradients", ["an array", "a tensor"]),
        ({"gradients": zeros(2, 11)}, "columns", ["10 rows", "0 to 10"]),
        ({"gradients": torch.zeros((2, 10), device="meta")}, "device", ["meta"]),
        ({"offset": -1}, "columns", ["10 rows", "-1 to 8"]),
        ({"out": zeros(2, 4)}, "out", ["(2, 3)", "(2, 4)"]),
        ({"out": torch.zeros((2, 3))}, "out", ["a tensor"]),
    ],
)
def test_bad_arguments_are_explained(arguments, code, values):
    gradients = arguments.pop("gradients", zeros(2, 10))
    with refused(f"projection.{code}", *values):
        project(gradients, spec_of("rademacher", 10, 3), **arguments)


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_rows_that_are_not_finite_are_named(kind):
    gradients, spec = real_gradients(12, 300), spec_of(kind, 300, 8)
    # The identity adds nothing up: 3e38 stays finite.
    for bad in (np.nan, np.inf, -np.inf, *([] if kind == "identity" else [3e38])):
        gradients[9, 250:] = bad
        with refused("projection.not_finite", "rows 9"):
            project(gradients, spec)


@pytest.mark.parametrize(
    ("field", "code", "values"),
    [
        ({"kind": "radmacher"}, "kind", ["'radmacher'", ", ".join([*KINDS, "identity"])]),
        ({"n_params": 2**56}, "range", ["n_params", 2**56]),
        ({"seed": 2**64}, "range", ["seed", 2**64]),
        ({"stream": 2**32}, "range", ["stream", 2**32]),
        ({"version": 2}, "range", ["version", 2]),
        ({"proj_dim": 6, "kind": "hadamard"}, "power_of_two", ["hadamard", 6]),
        ({"kind": "tensor_sketch"}, "no_shapes", ["tensor_sketch"]),
        ({"kind": "tensor_sketch", "shapes": [(2, 3)]}, "shapes", ["6 entries", "n_params is 5"]),
        ({"kind": "normal", "shapes": [(5, 1)]}, "kind_without_shapes", ["normal"]),
        ({"proj_dim": 4, "kind": "identity"}, "identity_size", ["proj_dim 4", "n_params 5"]),
    ],
)
def test_fields_out_of_range_are_refused(field, code, values):
    good = {"kind": "rademacher", "n_params": 5, "proj_dim": 2, "seed": 0, "stream": 0}
    with refused(f"spec.{code}", *values):
        ProjectionSpec(**(good | field))


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
def test_empty_gradients(kind):
    spec = spec_of(kind, 10, 4)
    for shape in (0, 10), (3, 0), (0, 0):
        out = project(zeros(*shape), spec)
        np.testing.assert_array_equal(out, zeros(shape[0], spec.proj_dim))


@pytest.mark.skipif(
    not torch.cuda.is_available() and not config.ENABLE_CUDASIM,
    reason="runs with NUMBA_ENABLE_CUDASIM=1 or a GPU",
)
def test_what_a_machine_lacks_is_named(monkeypatch):
    """A package, then a GPU that is not too old."""
    monkeypatch.setattr(project_module, "is_simulated", lambda: False)
    require = project_module.require_numba_cuda.__wrapped__
    monkeypatch.setattr(project_module, "require_numba_cuda", require)
    spec = ProjectionSpec(kind="normal", n_params=9, proj_dim=4, seed=0, stream=0)

    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        with refused("projection.no_numba_cuda"):
            project_cuda([torch.ones((1, 9))], spec, 0, torch.zeros((1, 4)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (6, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "P40")
    with refused("projection.capability", "7.0", "P40, which has capability 6.1"):
        project_module.capability_of(torch.device("cuda", 0))
