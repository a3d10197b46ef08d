"""Slices of a projection on several threads: the same bits, errors, forks."""

import time
from functools import partial
from itertools import product, repeat

import numpy as np
import pytest
from projections import KINDS, real_gradients, spec_of

from trak_core.projection import project
from trak_core.projection.cpu import dense
from trak_core.projection.cpu import project as slicing
from trak_core.projection.cpu.project import slice_length


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_batches_and_threads_change_no_bit(kind):
    n = 2 * slice_length(spec_of(kind, 1, 8)) + 501
    gradients = real_gradients(11, n)
    spec = spec_of(kind, n + 77, 17)
    whole = project(gradients, spec, offset=77)
    blocks = np.split(gradients, [1, 1, 130, n // 2, n - 3], axis=1)
    np.testing.assert_array_equal(project(blocks, spec, offset=77), whole)
    np.testing.assert_array_equal(project(gradients, spec, offset=77, threads=3), whole)
    parts = [project(part, spec, offset=77, threads=2) for part in np.split(gradients, [1, 9])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_the_samples_change_no_bit(kind, monkeypatch):
    """Fewer slices than keep the threads busy, and samples enough for more than one share."""
    cut = []
    shares = slicing._shares
    kernel = slicing._KERNELS[kind]
    n_samples = (
        max(2 * kernel.least_samples, kernel.most_samples if kernel.most_samples < 100 else 0) + 5
    )
    gradients, spec = real_gradients(n_samples, 700), spec_of(kind, 700 + 77, 17)
    monkeypatch.setattr(slicing, "_shares", lambda n, *_: [slice(0, n)])
    whole = project(gradients, spec, offset=77)
    monkeypatch.setattr(slicing, "_shares", lambda *what: cut.append(shares(*what)) or cut[-1])
    blocks = np.split(gradients, [1, 1, 130, 697], axis=1)
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(project(blocks, spec, offset=77, threads=threads), whole)
    assert all(len(one) > 1 for one in cut[1:])
    assert (len(cut[0]) > 1) == (n_samples > kernel.most_samples)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_shares_are_all_samples_and_enough_for_the_threads(threads):
    kernel = slicing._Kernel(print, 1, least_samples=16, most_samples=128)
    for n_samples, n_slices in product([1, 16, 33, 64, 128, 129, 400], [1, 3, 5, 20]):
        shares = slicing._shares(n_samples, kernel, n_slices, threads)
        samples = [i for share in shares for i in range(share.start, min(share.stop, n_samples))]
        assert samples == list(range(n_samples))
        assert all(share.start % 16 == 0 and share.stop - share.start <= 128 for share in shares)
        assert len(shares) * n_slices >= min(threads, n_samples // 32 * n_slices)
        assert threads > 1 or len(shares) == -(-n_samples // 128)


def test_two_tiles_at_once_change_no_bit(monkeypatch):
    """Whichever of the two this machine's processor takes, the other one is computed too."""
    spec = spec_of("rademacher", 701 + 77, 19)
    for n_samples in (1, 8, 9, 16, 17, 35):
        results = []
        for in_pairs in (False, True):
            monkeypatch.setattr(dense, "holds_two_tiles", lambda pairs=in_pairs: pairs)
            results.append(project(real_gradients(n_samples, 701), spec, offset=77))
        np.testing.assert_array_equal(*results)


def test_waves_change_no_bit(monkeypatch):
    gradients = real_gradients(3, 7 * slice_length(spec_of("rademacher", 1, 8)) + 5)
    spec = spec_of("rademacher", gradients.shape[1], 8)
    expected = project(gradients, spec)
    for wave in (1, 2, 100):
        monkeypatch.setattr(slicing, "_CALLS", wave)
        np.testing.assert_array_equal(project(gradients, spec, threads=2), expected)
    monkeypatch.setattr(slicing, "_WAITING_BYTES", 0)  # one result a thread
    np.testing.assert_array_equal(project(gradients, spec, threads=3), expected)


@pytest.mark.parametrize("bad", [0, 1, 5])
def test_an_error_in_one_slice_ends_all(bad):
    done = []

    def call(i):
        time.sleep(0.01)
        done.append(i)
        if i == bad:
            raise MemoryError

    with pytest.raises(MemoryError):
        list(slicing._in_order(map(partial, repeat(call), range(100)), 3, 5))
    before = len(done)
    assert before <= bad + 5
    time.sleep(0.05)
    assert len(done) == before  # no thread works on beside what the caller tries next
