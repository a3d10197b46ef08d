"""What a projection refuses, with one error that says what must hold; and gradients of no size."""

import numpy as np
import pytest
import torch
from projections import KINDS, real_gradients, spec_of

from trak_core.errors import InputError
from trak_core.projection import project
from trak_core.spec import ProjectionSpec


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": np.zeros((2, 10))}, "float32.*dtype float64"),
        ({"gradients": np.zeros((2, 10), ">f4")}, "dtype >f4"),
        ({"gradients": torch.zeros((2, 10), dtype=torch.int32)}, "torch.int32"),
        ({"gradients": np.zeros(10, np.float32)}, r"shape \(10,\)"),
        ({"gradients": [np.zeros((2, 5, 1), np.float32)]}, r"shape \(2, 5, 1\)"),
        ({"gradients": []}, "at least one block"),
        ({"gradients": [[1.0, 2.0]]}, "Found list"),
        ({"gradients": [np.zeros((2, 5), np.float32), np.zeros((3, 5), np.float32)]}, "same"),
        ({"gradients": [np.zeros((2, 5), np.float32), np.zeros((2, 5), np.float16)]}, "same"),
        ({"gradients": [np.zeros((2, 5), np.float32), torch.zeros(2, 5)]}, "same"),
        ({"gradients": np.zeros((2, 11), np.float32)}, "10 rows. Found columns 0 to 11"),
        ({"gradients": torch.zeros((2, 10), device="meta")}, "Found meta"),
        ({"offset": 1}, "columns 1 to 11"),
        ({"offset": -1}, "columns -1 to 9"),
        ({"out": np.zeros((2, 4), np.float32)}, r"\(2, 3\)"),
        ({"out": np.zeros((2, 3))}, "float64"),
        ({"out": torch.zeros((2, 3))}, "same library"),
        ({"gradients": torch.zeros(2, 10), "out": np.zeros((2, 3), np.float32)}, "same library"),
        ({"accumulate": True}, "out=None"),
        ({"threads": 0}, "threads"),
    ],
)
def test_bad_arguments_are_explained(arguments, message):
    gradients = arguments.pop("gradients", np.zeros((2, 10), np.float32))
    with pytest.raises(InputError, match=message):
        project(gradients, spec_of("rademacher", 10, 3), **arguments)


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_rows_that_are_not_finite_are_named(kind, bad):
    gradients = real_gradients(12, 300)
    gradients[9, 250:] = bad
    if kind == "identity":
        gradients[9, 250] = np.nan
    with pytest.raises(InputError, match=r"rows 9\."):
        project(gradients, spec_of(kind, 300, 8))


@pytest.mark.parametrize(
    "field",
    [
        {"kind": "radmacher"},
        {"n_params": 0},
        {"n_params": 2**56},
        {"proj_dim": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"stream": 2**32},
        {"version": 2},
        {"stripes": 2},
        {"proj_dim": 6, "kind": "hadamard"},
        {"proj_dim": 6, "kind": "sjlt"},
        {"stripes": 0, "kind": "sjlt"},
        {"proj_dim": 4, "kind": "identity"},
    ],
)
def test_fields_out_of_range_are_refused(field):
    good = {"kind": "rademacher", "n_params": 5, "proj_dim": 2, "seed": 0, "stream": 0}
    with pytest.raises(InputError, match=next(iter(field))):
        ProjectionSpec(**(good | field))


@pytest.mark.parametrize("kind", [*KINDS, "identity"])
@pytest.mark.parametrize("shape", [(0, 10), (3, 0), (0, 0)])
def test_empty_gradients(kind, shape):
    spec = spec_of(kind, 10, 4)
    out = project(np.zeros(shape, np.float32), spec)
    np.testing.assert_array_equal(out, np.zeros((shape[0], spec.proj_dim), np.float32))
