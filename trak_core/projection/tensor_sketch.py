"""Tensor sketches with torch on any device, from the factors of outer products or from rows.

A gradient that is a sum of outer products, sum_t a_t b_t^T, can be sketched without forming it.
Entry (i, j) is added to column (bucket0[i] + bucket1[j]) mod k. Therefore the sketch of a b^T is
the circular convolution of two count sketches: x, of a with the buckets and signs of rows, and y,
of b with those of columns. The discrete Fourier transform F turns the convolution into a product.
This differs from the method of Pham and Pagh in:

1. One complex transform is enough for both factors, because F(x + i y)^2 is the transform of
   x * x - y * y + 2 i (x * y), where * is the convolution.
2. The squares are summed in the frequency domain over all tokens and parameters. A single inverse
   transform for each sample follows.
3. Each pair is first scaled to equal norms. The unused real part is then no larger than the
   imaginary part and adds no rounding error of its own.
4. Buckets are balanced (``reference.py``). The entries of a row or column shorter than k do not
   collide.

Source: Pham and Pagh, "Fast and scalable polynomial kernels via explicit feature maps", KDD 2013.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Self

import torch
from torch import Tensor

from trak_core.projection.cpu.sketches import add_squares_cpu, fill_pairs_cpu, hashes_of
from trak_core.settings import ProjectionSpec

# The largest size of count sketches that are transformed at once, in complex numbers. On a CPU,
# 1 MiB fits into a core's cache. On a GPU it is 64 MiB, because starting kernels takes 0.2 ms.
_PIECE, _PIECE_OF_GPU = 2**17, 2**23
# Costs on one core of an AMD EPYC in nanoseconds, measured with torch 2.13 for k = 1,024 and 4,096
# and layers of size 256 to 3,072. They select between two methods with equal results.
_TRANSFORM_NS = 0.33  # two transforms of a token and their product, divided by k log2(k)
_COUNT_NS = 2.0  # the addition of one entry of a token's factor to its bucket
_PRODUCT_NS = 0.035  # a token's term of one entry of a formed gradient
_CALL_NS = 150_000  # fixed cost of the sketch of a matrix from its factors
_LANES, _LANE_NS = 8, 4.0  # the addition of one entry of 8 samples' gradients to its bucket


def _token_ns(rows: int, columns: int, proj_dim: int) -> float:
    return _TRANSFORM_NS * proj_dim * log2(proj_dim + 1) + _COUNT_NS * (rows + columns)


def prefers_factors(n_samples: int, n_tokens: int, rows: int, columns: int, proj_dim: int) -> bool:
    """Return whether sums of outer products are cheaper to sketch from factors than to form.

    There are ``n_samples`` matrices of shape (rows, columns), each a sum of ``n_tokens`` outer
    products. This is an estimate for one core.
    """
    tiles = -(-n_samples // _LANES)
    by_entry = n_samples * n_tokens * _PRODUCT_NS + tiles * _LANE_NS
    by_factors = _CALL_NS + n_samples * n_tokens * _token_ns(rows, columns, proj_dim)
    return by_factors < rows * columns * by_entry


@lru_cache(maxsize=16)
def hashes_on(spec: ProjectionSpec, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """Return buckets and signs of each parameter's rows and of its columns, on a device."""
    assert spec.shapes is not None
    hashes = hashes_of(spec)
    on_device: list[list[tuple[Tensor, Tensor]]] = []
    for number, shape in enumerate(spec.shapes):
        pairs = [hashes.of(number, axis, shape[axis]) for axis in (0, 1)]
        on_device.append([
            (torch.from_numpy(buckets.astype("int64")).to(device), torch.tensor(signs).to(device))
            for buckets, signs in pairs
        ])
    return on_device


def _count_sketches(rows: Tensor, buckets: Tensor, signs: Tensor, proj_dim: int) -> Tensor:
    """Return the count sketches of rows (r, n), shape (r, proj_dim)."""
    rows = rows.float()
    sketches = rows.new_zeros(len(rows), proj_dim)
    # A run of proj_dim entries has no bucket twice, so the order of the sums is fixed.
    for first in range(0, rows.shape[1], proj_dim):
        run = slice(first, first + proj_dim)
        sketches.index_add_(1, buckets[run], rows[:, run] * signs[run])
    return sketches


def _scales(left: Tensor, right: Tensor) -> Tensor:
    """Return factors that make the norms of each pair of rows equal, shape (b, tokens, 2).

    Both factors are 0 if one of the rows is 0, unless the other one is not finite.
    """
    roots = torch.stack([_norms(left), _norms(right)], dim=2).sqrt_()
    scales = roots.flip(2).div_(roots)
    return scales.masked_fill_((roots == 0).any(2, keepdim=True), 0)


def _norms(rows: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=2, dtype=dtype).float()
    is_extreme = ~((norms > 1e-18) & (norms < 1e18))  # squares overflow or underflow in float32
    if is_extreme.any():
        exact = torch.linalg.vector_norm(rows[is_extreme], dim=1, dtype=torch.float64)
        norms[is_extreme] = exact.float()
    return norms


def _counts(
    spec: ProjectionSpec,
    number: int,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    *,
    by_kernel: bool,
    interleaved: bool,
) -> Tensor:
    """Return the count sketches x and y of each pair of rows, multiplied by its scales, float32.

    The shape is (tokens, k, 2) if ``interleaved``, else (tokens, 2, k). The kernel runs on CPUs.
    """
    k = spec.proj_dim
    if not by_kernel:
        hashes = hashes_on(spec, left.device)[number]
        factors = zip((left, right), scales.T, hashes, strict=True)
        sketches = [_count_sketches(x * scale[:, None], *hash_, k) for x, scale, hash_ in factors]
        return torch.stack(sketches, dim=2 if interleaved else 1)
    assert spec.shapes is not None
    rows, columns = spec.shapes[number]
    hashes = hashes_of(spec)
    counts = torch.empty(len(left), *((k, 2) if interleaved else (2, k)))
    fill_pairs_cpu(
        *(tensor.detach().contiguous().numpy() for tensor in (left, right, scales)),
        *hashes.of(number, 0, rows),
        *hashes.of(number, 1, columns),
        counts.view(-1, 2 * k).numpy(),
        *((2, 1) if interleaved else (1, k)),
    )
    return counts


def _pieces(left: Tensor, most: int) -> list[tuple[slice, slice]]:
    """Split samples and tokens into pieces of at most ``most`` tokens, but at least one."""
    n_samples, n_tokens = left.shape[:2]
    if n_tokens > most:
        starts = itertools.product(range(n_samples), range(0, n_tokens, max(1, most)))
        return [(slice(b, b + 1), slice(t, t + max(1, most))) for b, t in starts]
    step = max(1, most // max(1, n_tokens))
    return [(slice(b, b + step), slice(0, n_tokens)) for b in range(0, n_samples, step)]


def _transforms(
    spec: ProjectionSpec, number: int, left: Tensor, right: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the samples with the transforms of x + i y, shape (samples, tokens, k)."""
    scales, by_kernel = _scales(left, right), left.device.type == "cpu"
    most = _PIECE if by_kernel else _PIECE_OF_GPU
    for piece in _pieces(left, most // spec.proj_dim):
        a, b = (factor[piece].flatten(0, 1).float() for factor in (left, right))
        pairs = _counts(
            *(spec, number, a, b, scales[piece].flatten(0, 1)),
            by_kernel=by_kernel,
            interleaved=True,
        )
        transformed = torch.fft.fft(torch.view_as_complex(pairs))
        yield piece[0], transformed.view(*scales[piece].shape[:2], -1)


def _add_squares(into: Tensor, transformed: Tensor, by_kernel: bool) -> None:
    """Add the squares of transforms, shape (samples, tokens, k), summed over the tokens."""
    if not by_kernel:
        into += transformed.square().sum(1)
        return
    numbers, sums = (torch.view_as_real(tensor).flatten(-2) for tensor in (transformed, into))
    add_squares_cpu(numbers.numpy(), sums.numpy())


def _add_at(out: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values (b, m) to the columns (b, m) or (m,) of the rows of ``out`` in a fixed order."""
    columns = columns.expand_as(values)
    if out.device.type == "cpu":
        out.scatter_add_(1, columns, values)
    else:  # index_put_ sorts the indices; scatter_add_ would use atomic additions
        rows = torch.arange(len(out), device=out.device).unsqueeze(1).expand_as(columns)
        out.index_put_((rows, columns), values, accumulate=True)


def _add_lookups(
    out: Tensor, spec: ProjectionSpec, number: int, indices: Tensor, right: Tensor
) -> None:
    (bucket0, sign0), (bucket1, sign1) = hashes_on(spec, right.device)[number]
    columns = (bucket0[indices].unsqueeze(-1) + bucket1) % spec.proj_dim
    values = right.float() * sign1 * sign0[indices].unsqueeze(-1)
    _add_at(out, columns.flatten(1), values.flatten(1))


def add_rows(out: Tensor, blocks: list[Tensor], spec: ProjectionSpec, offset: int) -> None:
    """Add the sketches of formed gradients to ``out``, shape (b, k).

    The blocks have shape (b, n_i) and contain consecutive coordinates from ``offset`` on.
    """
    assert spec.shapes is not None
    stop = offset
    for block in blocks:
        start, stop = stop, stop + block.shape[1]
        first = 0
        for number, (n0, n1) in enumerate(spec.shapes):
            last = first + n0 * n1
            low, high = max(start, first), min(stop, last)
            if low < high:
                (bucket0, sign0), (bucket1, sign1) = hashes_on(spec, out.device)[number]
                entries = torch.arange(low - first, high - first, device=out.device)
                i, j = entries // n1, entries % n1
                values = block[:, low - start : high - start].float() * (sign0[i] * sign1[j])
                _add_at(out, (bucket0[i] + bucket1[j]) % spec.proj_dim, values)
            first = last


class OuterProducts:
    """Sketches of sums of outer products, one sum for each sample.

    The total is within 1e-6 sum_t |a_t| |b_t| of the definition, where t runs over all terms.

    Attributes:
        rows: Shape (b, k), float32: the terms that were added in the original domain.
        spectrum: Shape (b, k), complex128: the sums of squared transforms.
    """

    def __init__(self, spec: ProjectionSpec, n_samples: int, device: torch.device):
        """Set all sums to zero."""
        self.spec = spec
        self.rows = torch.zeros(n_samples, spec.proj_dim, device=device)
        self.spectrum = torch.zeros(n_samples, spec.proj_dim, dtype=torch.complex128, device=device)

    def add_products(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add sum_t left[b, t] right[b, t]^T to the gradient of parameter ``number``.

        Shapes are (b, tokens, n0) and (b, tokens, n1).
        """
        for samples, transformed in _transforms(self.spec, number, left, right):
            _add_squares(self.spectrum[samples], transformed, left.device.type == "cpu")

    def add_lookups(self, number: int, indices: Tensor, right: Tensor) -> None:
        """Add sum_t e_i right[b, t]^T, where e_i is the unit vector of i = indices[b, t]."""
        _add_lookups(self.rows, self.spec, number, indices, right)

    def total(self) -> Tensor:
        """Return the sketches, shape (b, k), float32."""
        # The imaginary part of sum_t F^-1(F(x_t + i y_t)^2) is 2 sum_t x_t * y_t.
        return self.rows + (torch.fft.ifft(self.spectrum).imag / 2).float()


@dataclass(frozen=True, slots=True)
class Contractions:
    """Inner products of vectors with the sketches of single outer products.

    Each token is sketched once for all vectors. With the transforms X, Y and V of x, y and v,
    <sketch, v> = Re <X Y, V> / k. All three are transforms of real vectors, so half of the
    frequencies suffice. One matrix product computes the results for all tokens and vectors. They
    are within 1e-6 |a_t| |b_t| |v| of the definition.

    Attributes:
        vectors: Shape (m, k), float32.
        spectra: Weights of the real and imaginary parts of X Y, (m, 2 (k // 2 + 1)), float32.
    """

    spec: ProjectionSpec
    vectors: Tensor
    spectra: Tensor

    @classmethod
    def of(cls, spec: ProjectionSpec, vectors: Tensor) -> Self:
        """Compute the Fourier transforms of the vectors."""
        k = spec.proj_dim
        spectra = torch.view_as_real(torch.fft.rfft(vectors.double())) * (2 / k)
        # Frequencies 0 and k / 2 have no conjugate partner, so they count once instead of twice.
        spectra[:, :: k // 2 if k % 2 == 0 else k] /= 2
        return cls(spec, vectors, spectra.flatten(1).float())

    def prefers_factors(self, n_samples: int, n_pairs: int, n_tokens: int, number: int) -> bool:
        """Return whether sketches are cheaper than products of the factors with each R v.

        There are ``n_pairs`` pairs of a sample and a vector, and ``n_tokens`` outer products in
        each sample.
        """
        assert self.spec.shapes is not None
        k, (rows, columns) = self.spec.proj_dim, self.spec.shapes[number]
        by_token = n_samples * _token_ns(rows, columns, k) + n_pairs * 2 * k * _PRODUCT_NS
        read = _COUNT_NS * min(n_pairs, len(self.vectors))
        return n_tokens * by_token < rows * columns * (n_pairs * n_tokens * _PRODUCT_NS + read)

    def inner_with_products(
        self,
        number: int,
        left: Tensor,
        right: Tensor,
        groups: Sequence[tuple[int, slice]],
        directions: Tensor,
    ) -> Tensor:
        """Return <left[b, t] right[b, t]^T, R v> for pairs of b and v, shape (pairs, tokens).

        Args:
            number: The parameter, as in ``OuterProducts``.
            left: Shape (b, tokens, n0).
            right: Shape (b, tokens, n1).
            groups: Each sample b, in ascending order, with the slice of its pairs.
            directions: The row of ``vectors`` in each pair, shape (pairs,).
        """
        products = self.vectors.new_empty(len(directions), left.shape[1])
        by_kernel = left.device.type == "cpu"
        if len(groups) < len(left):
            used = [b for b, _ in groups]
            left, right = left[used], right[used]
        pairs_of = [pairs for _, pairs in groups]
        scales = left.new_ones(left.shape[0] * left.shape[1], 2, dtype=torch.float32)
        for rows, tokens in _pieces(left, 2 * _PIECE // self.spec.proj_dim):
            a, b = (factor[rows, tokens].flatten(0, 1).float() for factor in (left, right))
            counts = _counts(
                *(self.spec, number, a, b, scales[: len(a)]), by_kernel=by_kernel, interleaved=False
            )
            x, y = torch.fft.rfft(counts).unbind(1)
            spectra = torch.view_as_real(x.mul_(y)).flatten(1).chunk(len(pairs_of[rows]))
            for pairs, spectrum in zip(pairs_of[rows], spectra, strict=True):
                products[pairs, tokens] = self.spectra[directions[pairs]] @ spectrum.T
        return products

    def inner_with_lookups(
        self,
        number: int,
        indices: Tensor,
        right: Tensor,
        groups: Sequence[tuple[int, slice]],
        directions: Tensor,
    ) -> Tensor:
        """Return <e_i right[b, t]^T, R v>, where e_i is the unit vector of i = indices[b, t]."""
        products = self.vectors.new_empty(len(directions), indices.shape[1])
        for b, pairs in groups:
            rows = self.vectors.new_zeros(indices.shape[1], self.spec.proj_dim)
            _add_lookups(rows, self.spec, number, indices[b, :, None], right[b, :, None])
            products[pairs] = self.vectors[directions[pairs]] @ rows.T
        return products
