"""CUDA kernels compute the defined matrix, on a GPU or in the simulator."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from numba import config
from refused import refused

from trak_core.projection import project
from trak_core.projection.cpu.dense import normal_entry
from trak_core.projection.cuda import (
    compiled,
    dense,
    device_functions,
    project_cuda,
    project_slices,
    variants,
)
from trak_core.projection.cuda import project as project_module
from trak_core.projection.reference import projection_matrix
from trak_core.settings import ProjectionSpec

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
GPU_ONLY = pytest.mark.skipif(not HAS_GPU, reason="runs where there is a GPU")
SLICE = 256
FAR = 2**33 + 72  # not the start of a slice, nor of a block of 128; a multiple of 8

# What a case needs: a kernel, and a spec without n_params, seed and stream.
CASES = {
    "portable-rademacher": ("portable", {"kind": "rademacher", "proj_dim": 37}),
    "portable-normal": ("portable", {"kind": "normal", "proj_dim": 37}),
    "tensor_core": ("tensor_core", {"kind": "rademacher", "proj_dim": 70}),
    "hadamard": ("hadamard", {"kind": "hadamard", "proj_dim": 32}),
    "hadamard-outer": ("hadamard", {"kind": "hadamard", "proj_dim": 256}),
}
# A case of each kernel, the one with most to it, where kernels of the same code do the same.
EACH = ["portable-normal", "tensor_core", "hadamard-outer"]
EXACT = [name for name in CASES if name != "portable-normal"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not config.ENABLE_CUDASIM, reason="runs with NUMBA_ENABLE_CUDASIM=1 or a GPU"
)


@pytest.fixture(autouse=True)
def small_and_poisoned(monkeypatch):
    """Many slices and launches of small inputs; memory that a kernel must write starts as NaN."""
    monkeypatch.setattr(project_slices, "SLICE", SLICE)
    monkeypatch.setattr(project_slices, "_FILL", 1)
    monkeypatch.setattr(variants, "FLUSH", 256)
    monkeypatch.setattr(variants, "HADAMARD_INNER", 128)
    monkeypatch.setattr(variants, "HADAMARD_FLUSH", 4)
    monkeypatch.setattr(project_module, "require_right_matrix", lambda *_: None)
    if not HAS_GPU:
        from simulator import run_one_thread_at_a_time

        monkeypatch.setattr(variants, "THREADS", 4)
        monkeypatch.setattr(variants, "SAMPLES", (2, 4))
        monkeypatch.setattr(variants, "HADAMARD_THREADS", 4)
        tiles = variants.Tile(1, 2, 1, 1), variants.Tile(2, 2, 2, 1)
        monkeypatch.setattr(variants, "TILES", tiles)
        run_one_thread_at_a_time(monkeypatch)
    # Fills new memory. `use_deterministic_algorithms` imports the compiler too, for seconds.
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def use(monkeypatch):
    """Make the kernel of a case the one that is chosen, and return its spec."""

    def use_case(name, n_params, seed=77 + (5 << 32), stream=9, **changes):
        kernel, fields = CASES[name]
        has_tensor_cores = kernel == "tensor_core"
        if HAS_GPU and has_tensor_cores and torch.cuda.get_device_capability() < (8, 0):
            pytest.skip("runs where the GPU has compute capability 8.0")
        capability = (8, 0) if has_tensor_cores else (7, 5)
        monkeypatch.setattr(project_module, "capability_of", lambda _: capability)
        fields = {**fields, **changes}
        spec = ProjectionSpec(n_params=n_params, seed=seed, stream=stream, **fields)
        assert project_module.choose(spec, torch.float32, DEVICE).name == kernel
        return spec

    return use_case


def projected(blocks, spec, offset):
    blocks = [blocks] if isinstance(blocks, torch.Tensor) else blocks
    out = torch.zeros((len(blocks[0]), spec.proj_dim), device=DEVICE)
    project_cuda([block.to(DEVICE) for block in blocks], spec, offset, out)
    return out.cpu().numpy()


def integers(n_samples, n, dtype=torch.float32):
    """Sums of small integers are exact in float32, and the integers in every dtype."""
    return torch.randint(-8, 9, (n_samples, n)).to(dtype)


def exact(gradients, spec, offset):
    """The sums in float64, those of integers in float32."""
    rows = projection_matrix(spec, offset, gradients.shape[1])
    sums = gradients.double().numpy() @ rows
    is_exact = spec.kind != "normal" and (gradients == gradients.round()).all()
    return sums.astype(np.float32) if is_exact else sums


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("offset", "seed", "stream"),
    [(5, 2**64 - 1, 2**32 - 1), (FAR + 5, 0x123456789ABCDEF0, 0x80000001)],
)
def test_matrix_is_the_definition_and_the_cpus_bit_for_bit(name, offset, seed, stream, use):
    n_rows, step = 11, 13
    spec = use(name, offset + n_rows * step, seed, stream)
    picks = torch.zeros((n_rows, n_rows * step))
    picks[:, ::step] = torch.eye(n_rows)
    actual = projected(picks, spec, offset)
    expected = projection_matrix(spec, offset, n_rows * step)[::step]
    np.testing.assert_array_equal(actual, expected.astype(np.float32))
    np.testing.assert_array_equal(actual, project(picks.numpy(), spec, offset=offset))


# Float32 of other kernels than the tensor cores', which split it, is summed exactly at every width.
SUMS = [
    *((name, torch.float32, 1, 1, 0, None) for name in EXACT),
    *(
        (name, dtype, 9, 197, FAR + 3, None)
        for name in EXACT
        for dtype in DTYPES[name != "tensor_core" :]
    ),
    *(
        (name, torch.float32, 2, 140, FAR, proj_dim)
        for name in ("portable-rademacher", "portable-normal", "tensor_core")
        for proj_dim in (1, 2, 16, 33, 130)
    ),
    *(("hadamard", torch.float32, 2, 140, FAR, proj_dim) for proj_dim in (1, 2, 16, 64)),
]


@pytest.mark.parametrize(("name", "dtype", "n_samples", "n", "offset", "proj_dim"), SUMS, ids=str)
def test_sums_of_integers_are_exact_at_every_width(
    name, dtype, n_samples, n, offset, proj_dim, use
):
    spec = use(name, offset + n, proj_dim=proj_dim or CASES[name][1]["proj_dim"])
    gradients = integers(n_samples, n, dtype)
    actual, expected = projected(gradients, spec, offset), exact(gradients, spec, offset)
    bound = 1e-6 if name == "portable-normal" else 0
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


@pytest.mark.parametrize("proj_dim", [512, 8192, 16384])
def test_transforms_of_full_length(proj_dim, use, monkeypatch):
    """Three and four rounds of butterflies, and two inputs added up."""
    monkeypatch.setattr(variants, "HADAMARD_INNER", min(proj_dim, 8192))
    monkeypatch.setattr(project_slices, "SLICE", 16384)
    spec = use("hadamard", FAR + 100, proj_dim=proj_dim)
    gradients = integers(1, 100)
    np.testing.assert_array_equal(projected(gradients, spec, FAR), exact(gradients, spec, FAR))


@pytest.mark.parametrize("tile", variants.TILES, ids=str)
def test_tiles_of_full_size(tile, use, monkeypatch):
    monkeypatch.setattr(variants, "TILES", (tile,))
    n_samples = 8 * tile.sample_tiles - 1
    spec = use("tensor_core", 130, proj_dim=tile.n_columns + 3 if HAS_GPU else 200)
    gradients = integers(n_samples, 130, torch.float16)
    np.testing.assert_array_equal(projected(gradients, spec, 0), exact(gradients, spec, 0))


# A slice has several blocks of `hadamard`, and one of `hadamard-outer`.
@pytest.mark.parametrize("name", [*EACH, "hadamard"])
def test_order_of_threads_changes_no_bit(name, use, monkeypatch):
    """A missing barrier would: every thread runs as far as it may before the next one starts."""
    spec = use(name, FAR + 300)
    gradients = torch.randn((3, 300))
    whole = projected(gradients, spec, FAR)
    if not HAS_GPU:
        from simulator import run_one_thread_at_a_time

        run_one_thread_at_a_time(monkeypatch, backwards=True)
    np.testing.assert_array_equal(projected(gradients, spec, FAR), whole)


# Bfloat16 by a kernel that reads it as it is, and by one that makes float32 of it.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in EACH),
        *((name, torch.bfloat16) for name in ("tensor_core", "hadamard")),
    ],
    ids=str,
)
def test_blocks_equal_their_concatenation(name, dtype, use, monkeypatch):
    """Also where the last slice lies in one block, to be read in place, and the first does not."""
    widths = [5, 0, 160, 11, 64]
    monkeypatch.setattr(project_slices, "BUDGET_BYTES", 20_000)  # several launches
    spec = use(name, FAR + sum(widths))
    gradients = torch.randn((2, sum(widths))).to(dtype)
    whole = projected(gradients, spec, FAR)
    copies = [part.clone() for part in gradients.split(widths, 1)]
    np.testing.assert_array_equal(projected(copies, spec, FAR), whole)


@pytest.mark.parametrize("name", EACH)
def test_chunks_cut_at_slices_and_batches_change_no_bit(name, use, monkeypatch):
    offset, n = 5 * SLICE - 40, 320
    gradients = torch.randn((3, n))
    spec = use(name, offset + n)
    whole = projected(gradients, spec, offset)
    out = torch.zeros((3, spec.proj_dim), device=DEVICE)
    for low, high in pairwise([0, 40, 40 + SLICE, n]):
        project_cuda([gradients[:, low:high].to(DEVICE)], spec, offset + low, out)
    np.testing.assert_array_equal(out.cpu().numpy(), whole)
    monkeypatch.setattr(project_slices, "BUDGET_BYTES", 1)  # row by row, slice by slice
    np.testing.assert_array_equal(projected(gradients, spec, offset), whole)


# Strides count entries of whatever size: each case has one dtype, each dtype two cases or three.
@pytest.mark.parametrize(("name", "dtype"), [*zip(CASES, 3 * DTYPES, strict=False)], ids=str)
def test_strided_rows_and_neighbours_untouched(name, dtype, use):
    spec = use(name, 140)
    memory = torch.full((3, 160), torch.nan, dtype=dtype, device=DEVICE)
    gradients = integers(3, 140, dtype)
    expected = exact(gradients, spec, 0)
    memory[:, 8:148] = gradients.to(DEVICE)
    results = torch.full((3, spec.proj_dim + 2), -7.0, device=DEVICE)
    results[:, 1:-1] = 0
    project_cuda([memory[:, 8:148]], spec, 0, results[:, 1:-1])
    actual = results.cpu().numpy()
    np.testing.assert_allclose(actual[:, 1:-1], expected, rtol=1e-5, atol=1e-4)
    assert (actual[:, [0, -1]] == -7).all()
    columns = gradients.t().contiguous().t().to(DEVICE)
    out = torch.zeros((spec.proj_dim, 3), device=DEVICE).t()
    project_cuda([columns], spec, 0, out)
    np.testing.assert_array_equal(out.cpu().numpy(), actual[:, 1:-1])


# Tensor cores take float32 in parts, whose exponents have ends both ways.
@pytest.mark.parametrize(
    ("name", "deviation"), [*((name, 1e-8) for name in EACH), ("tensor_core", 1e8)]
)
def test_accurate_at_any_scale(name, deviation, use):
    spec = use(name, 300)
    gradients = deviation * torch.randn((2, 300))
    expected = exact(gradients, spec, 0)
    error = np.linalg.norm(projected(gradients, spec, 0) - expected) / np.linalg.norm(expected)
    assert error < (5e-6 if CASES[name][0] == "tensor_core" else 1e-6)


def test_long_sums_on_tensor_cores_are_made_of_short_ones(use, monkeypatch):
    """One sum of all would stand at 2^24, where adding 1 changes nothing."""
    monkeypatch.setattr(project_slices, "SLICE", 512)
    spec = use("tensor_core", 512)
    signs = torch.tensor(projection_matrix(spec, 0, 512)[:, 0])
    gradients = torch.zeros(512)
    gradients[:256:16], gradients[256::16] = 2.0**20, 1.0
    for dtype in (torch.float32, torch.bfloat16):
        actual = projected((gradients * signs).to(dtype)[None], spec, 0)
        assert actual[0, 0] == 2**24 + 16


@pytest.mark.skipif(HAS_GPU, reason="runs where numba simulates the GPU")
def test_every_level_of_normal_is_the_cpus():
    words = np.array(
        [sum(min(max(s - 255 * i, 0), 255) << (8 * i) for i in range(4)) for s in range(1021)],
        np.uint32,
    )
    levels = [device_functions.normal_of(word) for word in words]
    np.testing.assert_array_equal(levels, [normal_entry.py_func(word) for word in words])
    assert len(set(levels)) == 1021


@pytest.mark.parametrize("name", ["tensor_core", "portable-rademacher"])
def test_not_finite_stays_not_finite_in_its_row(name, use):
    spec = use(name, 100)
    gradients = torch.randn((3, 100))
    gradients[0, 50], gradients[2, 3] = torch.inf, torch.nan
    actual = projected(gradients, spec, 0)
    assert not np.isfinite(actual[[0, 2]]).any()
    assert np.isfinite(actual[1]).all()


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
        covering = list(
            project_slices.runs(
                bounds, usable, least=least, most_in_place=most, most_gathered=most + 1
            )
        )
        covered = [s for run in covering for s in range(run.first_slice, run.last_slice)]
        assert covered == list(range(edges[0] // SLICE, -(-edges[-1] // SLICE)))
        for run in covering:
            start = max(run.first_slice * SLICE, edges[0])
            stop = min(run.last_slice * SLICE, edges[-1])
            if run.block is None:
                assert run.last_slice - run.first_slice <= most + 1
            else:
                assert usable[run.block]
                assert bounds[run.block][0] <= start < stop <= bounds[run.block][1]
                assert run.last_slice - run.first_slice <= most


@pytest.mark.parametrize(
    ("kind", "dtype", "capability", "name"),
    [
        ("rademacher", torch.float32, (7, 5), "portable"),
        ("rademacher", torch.float32, (8, 0), "tensor_core"),
        ("rademacher", torch.bfloat16, (9, 0), "tensor_core"),
        ("normal", torch.float16, (9, 0), "portable"),
        ("hadamard", torch.float32, (12, 0), "hadamard"),
    ],
)
def test_kind_and_capability_choose_the_kernel(kind, dtype, capability, name, monkeypatch):
    monkeypatch.setattr(project_module, "capability_of", lambda _: capability)
    spec = ProjectionSpec(kind=kind, n_params=9, proj_dim=4, seed=0, stream=0)
    method = project_module.choose(spec, dtype, DEVICE)
    assert method.name == name
    assert (method.n_planes == 2) == (name == "tensor_core" and dtype is torch.float32)


# What a message about a wrong kernel says of the device, and of the entries.
PLACE = re.compile(r"(?<=run on ).*?(?=\. It failed)")
WHERE = re.compile(r"On .* are wrong .* coordinate .*(?= Project on the CPU)")


class TestSelfTest:
    @pytest.fixture(autouse=True)
    def small(self, monkeypatch, tmp_path):
        monkeypatch.setattr(project_module, "_passed", set())
        monkeypatch.setattr(project_module, "COLUMNS", 35)
        monkeypatch.setattr(project_module, "STEP", 23)
        # On a GPU, neither machine code nor marks of other tests.
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        compiled._function.cache_clear()
        yield
        compiled._function.cache_clear()

    # From before the fixture that spares the other tests the self-test.
    run = staticmethod(project_module.require_right_matrix)

    def check(self, spec, dtype, n_samples):
        method = project_module.choose(spec, dtype, DEVICE)
        self.run(method, spec, dtype, DEVICE, n_samples)

    @pytest.mark.parametrize(("name", "dtype"), list(zip(CASES, DTYPES * 3, strict=False)), ids=str)
    def test_right_kernels_pass_once(self, name, dtype, use, monkeypatch):
        spec = use(name, 100)
        self.check(spec, dtype, 3)
        monkeypatch.setattr(project_module, "projection_matrix", None)  # not called again
        self.check(spec, dtype, 3)

    def test_comes_before_the_first_projection(self, use, monkeypatch):
        monkeypatch.setattr(project_module, "require_right_matrix", self.run)
        monkeypatch.setattr(project_module, "projection_matrix", lambda spec, *_: np.ones((1, 35)))
        with refused("projection.kernel_differs", "kernel portable", WHERE):
            projected(torch.ones((1, 100)), use("portable-rademacher", 100), 0)

    def test_wrong_kernel_is_an_error(self, use, monkeypatch):
        @device_functions.device_function
        def never_negative(word, bit):
            return np.float32(1)

        monkeypatch.setattr(dense, "sign_of", never_negative)
        dense.portable_kernel.cache_clear()
        spec = use("portable-rademacher", 100)
        for _ in range(2):  # a failure is not forgotten
            with refused("projection.kernel_differs", "kernel portable", WHERE):
                self.check(spec, torch.float32, 3)
        dense.portable_kernel.cache_clear()

    def test_kernel_that_does_not_start_is_explained(self, use, monkeypatch):
        def refuse(*_):
            raise RuntimeError("unsupported PTX version")

        monkeypatch.setattr(project_slices, "launch", refuse)
        with refused("projection.kernel_fails", PLACE, "RuntimeError: unsupported PTX version"):
            self.check(use("portable-rademacher", 100), torch.float32, 3)


def test_hadamard_says_its_limit(use, monkeypatch):
    spec = ProjectionSpec(kind="hadamard", n_params=9, proj_dim=512, seed=0, stream=0)
    with refused("projection.gpu_proj_dim", 256, 512):
        projected(torch.ones((1, 9)), spec, 0)


@GPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_project_calls_the_kernels(name, use):
    spec = use(name, 300)
    gradients = integers(3, 300).to(DEVICE)
    actual = project(gradients, spec, scale=True)
    assert actual.device == gradients.device
    np.testing.assert_allclose(
        actual.cpu(), exact(gradients.cpu(), spec, 0) * spec.scale, rtol=1e-5, atol=1e-5
    )


@GPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_work_is_ordered_on_the_current_stream(name, use):
    spec = use(name, 2**20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        gradients = torch.zeros((4, 2**20), device=DEVICE)
        for _ in range(16):
            gradients += 1
        out = torch.zeros((4, spec.proj_dim), device=DEVICE)
        project_cuda([gradients], spec, 0, out)
        actual = out.clone()
    side.synchronize()
    # A power of two, by which every sum grows without rounding.
    np.testing.assert_array_equal(actual.cpu(), 16 * projected(torch.ones((4, 2**20)), spec, 0))


@GPU_ONLY
@pytest.mark.parametrize("name", CASES)
def test_memory_is_bounded_and_sizes_are_64_bit(name, use, monkeypatch):
    """Rows further apart than 2^31 elements."""
    monkeypatch.setattr(project_slices, "SLICE", 65536)
    monkeypatch.setattr(project_slices, "_FILL", 512)
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
