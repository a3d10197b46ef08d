"""The kernels make the matrix of the definition, on a GPU where there is one, else simulated."""

import sys
from itertools import pairwise

import numba.cuda
import numpy as np
import pytest
import torch
from numba import config
from simulator import run_one_thread_at_a_time

from trak_core.errors import InputError
from trak_core.projection.cuda import (
    _choose,
    _slices,
    hadamard,
    portable,
    project_cuda,
    sjlt,
    tensor_core,
)
from trak_core.projection.cuda import _project as door
from trak_core.projection.cuda._device import device_function
from trak_core.projection.reference import projection_matrix
from trak_core.spec import ProjectionSpec

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
GPU_ONLY = pytest.mark.skipif(not HAS_GPU, reason="runs where there is a GPU")
SLICE = 512
FAR = 2**33 + 72  # not the start of a slice, nor of a block of 128; a multiple of 8

# What a case needs: a kernel, and a spec without n_params, seed and stream.
CASES = {
    "portable-rademacher": ("portable", {"kind": "rademacher", "proj_dim": 37}),
    "portable-normal": ("portable", {"kind": "normal", "proj_dim": 37}),
    "tensor_core": ("tensor_core", {"kind": "rademacher", "proj_dim": 70}),
    "hadamard": ("hadamard", {"kind": "hadamard", "proj_dim": 32}),
    "hadamard-outer": ("hadamard", {"kind": "hadamard", "proj_dim": 256}),
    "sjlt": ("sjlt", {"kind": "sjlt", "proj_dim": 64}),
    "sjlt-wide": ("sjlt", {"kind": "sjlt", "proj_dim": 96, "stripes": 6}),
}
EXACT = [name for name in CASES if name not in {"portable-normal"}]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not config.ENABLE_CUDASIM, reason="runs with NUMBA_ENABLE_CUDASIM=1 or a GPU"
)


@pytest.fixture(autouse=True)
def small_and_poisoned(monkeypatch):
    """Many slices and launches of small inputs; memory that a kernel must write starts as NaN."""
    monkeypatch.setattr(_slices, "SLICE", SLICE)
    monkeypatch.setattr(_slices, "_FILL", 1)
    monkeypatch.setattr(tensor_core, "FLUSH", 256)
    monkeypatch.setattr(hadamard, "INNER", 128)
    monkeypatch.setattr(sjlt, "MOST_COLUMNS", 8)
    monkeypatch.setattr(door, "require_right_matrix", lambda *_: None)
    if not HAS_GPU:
        monkeypatch.setattr(portable, "THREADS", 4)
        monkeypatch.setattr(hadamard, "_THREADS", 4)
        tiles = tensor_core.Tile(1, 2, 1, 1), tensor_core.Tile(2, 2, 2, 1)
        monkeypatch.setattr(tensor_core, "TILES", tiles)
        run_one_thread_at_a_time(monkeypatch)
    torch.use_deterministic_algorithms(True)  # fills new memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def use(monkeypatch):
    """Make the kernel of a case the one that is chosen, and return its spec."""

    def choose(name, n_params, seed=77 + (5 << 32), stream=9, **changes):
        kernel, fields = CASES[name]
        has_tensor_cores = kernel == "tensor_core"
        if HAS_GPU and has_tensor_cores and torch.cuda.get_device_capability() < (8, 0):
            pytest.skip("runs where the GPU has compute capability 8.0")
        capability = (8, 0) if has_tensor_cores else (7, 5)
        monkeypatch.setattr(_choose, "capability_of", lambda _: capability)
        fields = {**fields, **changes}
        return ProjectionSpec(n_params=n_params, seed=seed, stream=stream, **fields)

    return choose


def projected(blocks, spec, offset):
    blocks = [blocks] if isinstance(blocks, torch.Tensor) else blocks
    out = torch.zeros((len(blocks[0]), spec.proj_dim), device=DEVICE)
    project_cuda([block.to(DEVICE) for block in blocks], spec, offset, out)
    return out.cpu().numpy()


def integers(n_samples, n, dtype=torch.float32):
    """Sums of small integers are exact in float32, and the integers in every dtype."""
    return torch.randint(-8, 9, (n_samples, n)).to(dtype)


def exact(gradients, spec, offset):
    """The sums, as one float32 product with the factor of the kind where there is one."""
    n = gradients.shape[1]
    return gradients.double().numpy() @ projection_matrix(spec, offset, n)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("offset", "seed", "stream"),
    [(0, 0, 0), (5, 2**64 - 1, 2**32 - 1), (FAR + 5, 0x123456789ABCDEF0, 0x80000001)],
)
def test_matrix_is_the_definition_bit_for_bit(name, offset, seed, stream, use):
    n_rows, step = 11, 13
    spec = use(name, offset + n_rows * step, seed, stream)
    picks = torch.zeros((n_rows, n_rows * step))
    picks[:, ::step] = torch.eye(n_rows)
    found = projected(picks, spec, offset)
    expected = projection_matrix(spec, offset, n_rows * step)[::step]
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_samples", "n", "offset"), [(1, 1, 0), (3, 700, 0), (9, 301, FAR + 3)])
def test_sums_of_integers_are_exact(name, dtype, n_samples, n, offset, use):
    spec = use(name, offset + n)
    gradients = integers(n_samples, n, dtype)
    expected = exact(gradients, spec, offset)
    found = projected(gradients, spec, offset)
    np.testing.assert_allclose(found, expected, rtol=0 if spec.entry_factor % 1 == 0 else 1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("proj_dim", [1, 2, 16, 33, 130])
def test_every_width(name, proj_dim, use):
    changes: dict = {"proj_dim": proj_dim}
    if CASES[name][0] == "sjlt":
        changes["stripes"] = 1
    if CASES[name][0] == "hadamard" and proj_dim & (proj_dim - 1):
        pytest.skip("hadamard exists for powers of two only")
    spec = use(name, FAR + 140, **changes)
    gradients = integers(2, 140)
    expected = exact(gradients, spec, FAR)
    found = projected(gradients, spec, FAR)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("proj_dim", [512, 8192, 16384])
def test_transforms_of_full_length(proj_dim, use, monkeypatch):
    """Three and four rounds of butterflies, and two inputs added up."""
    monkeypatch.setattr(hadamard, "INNER", min(proj_dim, 8192))
    monkeypatch.setattr(_slices, "SLICE", 16384)
    spec = use("hadamard", FAR + 100, proj_dim=proj_dim)
    gradients = integers(1, 100)
    np.testing.assert_array_equal(projected(gradients, spec, FAR), exact(gradients, spec, FAR))


@pytest.mark.parametrize("tile", [tensor_core.TILES[0], tensor_core.TILES[2]], ids=str)
def test_tiles_of_full_size(tile, use, monkeypatch):
    monkeypatch.setattr(tensor_core, "TILES", (tile,))
    n_samples = 8 * tile.sample_tiles - 1
    spec = use("tensor_core", 130, proj_dim=tile.n_columns + 3 if HAS_GPU else 200)
    gradients = integers(n_samples, 130, torch.float16)
    np.testing.assert_array_equal(projected(gradients, spec, 0), exact(gradients, spec, 0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_equal_their_concatenation(name, dtype, use, monkeypatch):
    """Also where some slices lie in one block, to be read in place, and others do not."""
    widths = [5, 0, 1100, 11, 640]
    monkeypatch.setattr(_slices, "BUDGET_BYTES", 20_000)  # several launches
    spec = use(name, FAR + sum(widths))
    gradients = torch.randn((2, sum(widths))).to(dtype)
    whole = projected(gradients, spec, FAR)
    np.testing.assert_array_equal(projected(gradients.split(widths, 1), spec, FAR), whole)
    copies = [part.clone() for part in gradients.split(widths, 1)]
    np.testing.assert_array_equal(projected(copies, spec, FAR), whole)


@pytest.mark.parametrize("name", CASES)
def test_chunks_cut_at_slices_and_batches_change_no_bit(name, use, monkeypatch):
    offset = 5 * SLICE - 100
    gradients = torch.randn((5, 900))
    spec = use(name, offset + 900)
    whole = projected(gradients, spec, offset)
    out = torch.zeros((5, spec.proj_dim), device=DEVICE)
    cuts = [0, 100, 100 + SLICE, 900]
    for low, high in pairwise(cuts):
        project_cuda([gradients[:, low:high].to(DEVICE)], spec, offset + low, out)
    if spec.entry_factor == 1 or spec.entry_factor % 1 == 0:
        np.testing.assert_array_equal(out.cpu().numpy(), whole)
    np.testing.assert_allclose(out.cpu().numpy(), whole, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(_slices, "BUDGET_BYTES", 1)  # row by row, slice by slice
    np.testing.assert_array_equal(projected(gradients, spec, offset), whole)
    np.testing.assert_array_equal(projected(gradients[2:3], spec, offset)[0], whole[2])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_and_neighbours_untouched(name, dtype, use):
    spec = use(name, 200)
    memory = torch.full((3, 216), torch.nan, dtype=dtype, device=DEVICE)
    gradients = integers(3, 200, dtype)
    expected = exact(gradients, spec, 0)
    memory[:, 8:208] = gradients.to(DEVICE)
    results = torch.full((3, spec.proj_dim + 2), -7.0, device=DEVICE)
    results[:, 1:-1] = 0
    project_cuda([memory[:, 8:208]], spec, 0, results[:, 1:-1])
    found = results.cpu().numpy()
    np.testing.assert_allclose(found[:, 1:-1], expected, rtol=1e-5, atol=1e-4)
    assert (found[:, [0, -1]] == -7).all()
    columns = gradients.t().contiguous().t().to(DEVICE)
    out = torch.zeros((spec.proj_dim, 3), device=DEVICE).t()
    project_cuda([columns], spec, 0, out)
    np.testing.assert_array_equal(out.cpu().numpy(), found[:, 1:-1])


@pytest.mark.parametrize("name", CASES)
def test_adds_to_the_result(name, use):
    spec = use(name, 100)
    gradients = torch.randn((2, 100))
    out = torch.full((2, spec.proj_dim), 1000.0, device=DEVICE)
    project_cuda([gradients.to(DEVICE)], spec, 0, out)
    expected = 1000 + exact(gradients, spec, 0)
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("deviation", [1e-8, 1.0, 1e8])
def test_accurate_at_any_scale(name, deviation, use):
    spec = use(name, 700)
    gradients = deviation * torch.randn((2, 700))
    expected = exact(gradients, spec, 0)
    error = np.linalg.norm(projected(gradients, spec, 0) - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if CASES[name][0] == "tensor_core" else 1e-6)


@pytest.mark.parametrize("name", ["tensor_core", "portable-rademacher"])
def test_not_finite_stays_not_finite_in_its_row(name, use):
    spec = use(name, 100)
    gradients = torch.randn((3, 100))
    gradients[0, 50], gradients[2, 3] = torch.inf, torch.nan
    found = projected(gradients, spec, 0)
    assert not np.isfinite(found[[0, 2]]).any()
    assert np.isfinite(found[1]).all()


def test_no_columns_and_no_samples_add_nothing(use):
    spec = use("portable-rademacher", 100)
    assert (projected(torch.ones((3, 0)), spec, 7) == 0).all()
    assert projected(torch.ones((0, 5)), spec, 7).shape == (0, 37)


def test_runs_cover_every_slice_once():
    generator = np.random.default_rng(0)
    for _ in range(200):
        edges = np.cumsum(generator.integers(1, 4 * SLICE, 8)).tolist()
        bounds = list(pairwise(edges))
        usable = (generator.random(7) < 0.7).tolist()
        least, most = int(generator.integers(1, 4)), int(generator.integers(1, 5))
        found = list(
            _slices.runs(bounds, usable, least=least, most_in_place=most, most_gathered=most + 1)
        )
        covered = [s for run in found for s in range(run.first_slice, run.last_slice)]
        assert covered == list(range(edges[0] // SLICE, -(-edges[-1] // SLICE)))
        for run in found:
            start = max(run.first_slice * SLICE, edges[0])
            stop = min(run.last_slice * SLICE, edges[-1])
            if run.block is None:
                assert run.last_slice - run.first_slice <= most + 1
            else:
                assert usable[run.block]
                assert bounds[run.block][0] <= start < stop <= bounds[run.block][1]
                assert run.last_slice - run.first_slice <= most


class TestSelfTest:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch):
        monkeypatch.setattr(_choose, "_passed", set())
        monkeypatch.setattr(_choose, "TEST_COLUMNS", 35)
        monkeypatch.setattr(_choose, "TEST_STEP", 23)

    @pytest.mark.parametrize("name", CASES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_right_kernels_pass_once(self, name, dtype, use, monkeypatch):
        spec, device = use(name, 100), torch.device(DEVICE)
        _choose.require_right_matrix(spec, dtype, device, 5)
        monkeypatch.setattr(_choose, "projection_matrix", None)  # not called again
        _choose.require_right_matrix(spec, dtype, device, 4)

    def test_each_variant_is_tested(self, use):
        for n_samples in (3, 30):
            spec = use("portable-normal", 100)
            _choose.require_right_matrix(spec, torch.float32, torch.device(DEVICE), n_samples)
        assert len(_choose._passed) == 2

    def test_wrong_kernel_is_an_error(self, use, monkeypatch):
        @device_function
        def never_negative(word, bit):
            del word, bit
            return np.float32(1)

        monkeypatch.setattr(portable, "sign_of", never_negative)
        portable.portable_kernel.cache_clear()
        spec, device = use("portable-rademacher", 100), torch.device(DEVICE)
        for _ in range(2):  # a failure is not forgotten
            with pytest.raises(InputError, match=r"kernel portable must .* wrong of .* coordinate"):
                _choose.require_right_matrix(spec, torch.float32, device, 3)
        portable.portable_kernel.cache_clear()


class TestMissing:
    @pytest.fixture(autouse=True)
    def not_simulated(self, monkeypatch):
        monkeypatch.setattr(_choose, "is_simulated", lambda: False)
        _choose.require_numba_cuda.cache_clear()
        yield
        _choose.require_numba_cuda.cache_clear()

    def test_package(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(InputError, match=r"package numba-cuda\. .* pip install"):
            project_cuda([], None, 0, None)

    def test_driver(self, monkeypatch):
        monkeypatch.setattr(numba.cuda, "is_available", lambda: False)
        monkeypatch.setattr(numba.cuda, "cuda_error", lambda: "libcuda.so not found", raising=False)
        with pytest.raises(InputError, match=r"CUDA driver.*Found: libcuda\.so not found"):
            project_cuda([], None, 0, None)


def test_old_gpu_is_an_error(use, monkeypatch):
    spec = use("portable-rademacher", 100)
    monkeypatch.setattr(_choose, "capability_of", lambda _: (6, 1))
    with pytest.raises(InputError, match=r"capability 7\.0 or later\. Found 6\.1"):
        projected(torch.ones((1, 100)), spec, 0)


def test_hadamard_says_its_limit(use):
    with pytest.raises(InputError, match="proj_dim at most 512 on a GPU. Found 1024"):
        projected(torch.ones((1, 100)), use("hadamard", 100, proj_dim=1024), 0)


@GPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_work_is_ordered_on_the_current_stream(name, use):
    spec = use(name, 2**20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients = torch.zeros((4, 2**20), device=DEVICE)
        for _ in range(20):
            gradients += 1
        out = torch.zeros((4, spec.proj_dim), device=DEVICE)
        project_cuda([gradients], spec, 0, out)
        found = out.clone()
    side.synchronize()
    np.testing.assert_allclose(
        found.cpu(), 20 * projected(torch.ones((4, 2**20)), spec, 0), rtol=1e-5
    )


@GPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_and_sizes_are_64_bit(name, use, monkeypatch):
    """Rows further apart than 2^31 elements."""
    monkeypatch.setattr(_slices, "SLICE", 65536)
    monkeypatch.setattr(_slices, "_FILL", 512)
    n = 2**31 + 8
    spec = use(name, FAR + n)
    memory = torch.zeros((2, n), dtype=torch.float16, device=DEVICE)
    tail = integers(2, 300, torch.float16)
    memory[:, -300:] = tail.to(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = torch.zeros((2, spec.proj_dim), device=DEVICE)
    project_cuda([memory[:, -(2**24) :]], spec, FAR + n - 2**24, out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
    np.testing.assert_allclose(out.cpu(), exact(tail, spec, FAR + n - 300), rtol=1e-5, atol=1e-3)
