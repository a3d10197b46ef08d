"""Tensor sketches with torch, on any device: of outer products by their factors, and of rows.

A gradient of a matrix that is a sum of outer products, sum_t a_t b_t^T, need not be formed to be
sketched. Entry (i, j) goes to column bucket0[i] + bucket1[j] mod k: so the sketch of a b^T is the
circular convolution of two count sketches, x of a by the rows' buckets and signs and y of b by the
columns', and Fourier transforms turn it into a product. One transform serves both, because the
imaginary part of (x + i y)^2, convolved with itself, is twice the convolution of x and y. The
squares of all tokens and parameters are added up in the frequency domain, and one inverse transform
a sample ends it. Each pair is scaled to equal norms first, so that the real part, which isn't
wanted, is no larger than what is and brings no rounding of its own.

Source: Pham and Pagh, "Fast and scalable polynomial kernels via explicit feature maps", KDD 2013.
The buckets are balanced here (``reference.py``): entries of a row or a column shorter than k never
collide.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from typing import Self

import torch
from torch import Tensor

from trak_core.projection.cpu.sketches import add_squares_cpu, fill_pairs_cpu, sides_of
from trak_core.spec import ProjectionSpec

# Complex numbers of a piece of count sketches: 1 MiB, and as much for their transforms. Both stay
# in a core's own cache from the counts to the squares. A GPU takes 64 MiB at once, because its host
# needs some .2 ms to start a piece's kernels.
_PIECE, _PIECE_OF_GPU = 2**17, 2**23
# What things take on a core of an AMD EPYC, in nanoseconds, measured with torch 2.13 for k =
# 1,024 and 4,096 and matrices of layers of 256 to 3,072. They choose between two ways to the same
# numbers.
_TRANSFORM_NS = 0.33  # a token: two transforms and their product, each k log2(k)
_COUNT_NS = 2.0  # a token: an entry of a factor put into its bucket
_PRODUCT_NS = 0.035  # a token: an entry of a formed gradient
_CALL_NS = 150_000  # what starts the sketch of a matrix by its factors, however small it is
# An entry of a formed gradient put into its bucket, eight samples at once.
_LANES, _LANE_NS = 8, 4.0


def prefers_factors(n_samples: int, n_tokens: int, rows: int, columns: int, proj_dim: int) -> bool:
    """Estimate whether sums of outer products are cheaper to sketch by their factors than to form.

    There are ``n_samples`` sums of ``n_tokens`` products each, matrices of rows x columns.

    Returns:
        An estimate, by the costs of one core.
    """
    by_token = _TRANSFORM_NS * proj_dim * log2(proj_dim + 1) + _COUNT_NS * (rows + columns)
    tiles = -(-n_samples // _LANES)
    by_entry = n_samples * n_tokens * _PRODUCT_NS + tiles * _LANE_NS
    return _CALL_NS + n_samples * n_tokens * by_token < rows * columns * by_entry


@lru_cache(maxsize=16)
def sides_on(spec: ProjectionSpec, device: torch.device) -> list[list[tuple[Tensor, Tensor]]]:
    """Return buckets and signs of each parameter's rows, and of its columns."""
    assert spec.shapes is not None
    sides = sides_of(spec)
    return [
        [
            (
                torch.from_numpy(buckets.astype("int64")).to(device),
                torch.from_numpy(signs).to(device),
            )
            for buckets, signs in (sides.side(number, which, shape[which]) for which in (0, 1))
        ]
        for number, shape in enumerate(spec.shapes)
    ]


def _counted(rows: Tensor, buckets: Tensor, signs: Tensor, proj_dim: int) -> Tensor:
    """Return the count sketches of rows (r, n), shape (r, proj_dim)."""
    rows = rows.float()
    sketches = rows.new_zeros(len(rows), proj_dim)
    for first in range(0, rows.shape[1], proj_dim):  # no bucket comes twice in a run
        run = slice(first, first + proj_dim)
        sketches.index_add_(1, buckets[run], rows[:, run] * signs[run])
    return sketches


def _scales(left: Tensor, right: Tensor) -> Tensor:
    """Return factors, shape (b, tokens, 2), that make the norms of each pair of rows equal.

    Both are zero where a row is, so that the other doesn't count, unless it isn't finite.
    """
    roots = torch.stack([_norms(left), _norms(right)], dim=2).sqrt_()
    scales = roots.flip(2).div_(roots)
    return scales.masked_fill_((roots == 0).any(2, keepdim=True), 0)


def _norms(rows: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=2, dtype=dtype).float()
    unusual = ~((norms > 1e-18) & (norms < 1e18))  # squares that float32 doesn't hold
    if unusual.any():
        exact = torch.linalg.vector_norm(rows[unusual], dim=1, dtype=torch.float64)
        norms[unusual] = exact.float()
    return norms


def _counts(
    spec: ProjectionSpec,
    number: int,
    left: Tensor,
    right: Tensor,
    scales: Tensor,
    *,
    by_kernel: bool,
    in_turn: bool,
) -> Tensor:
    """Return count sketches x and y of each pair of rows, which are scaled first, float32.

    Shape (tokens, k, 2) if their entries stand in turn, else (tokens, 2, k). The kernel is for
    CPUs.
    """
    k = spec.proj_dim
    if not by_kernel:
        sides = zip((left, right), scales.T, sides_on(spec, left.device)[number], strict=True)
        counted = [_counted(x * scale[:, None], *own, k) for x, scale, own in sides]
        return torch.stack(counted, dim=2 if in_turn else 1)
    assert spec.shapes is not None
    sides = sides_of(spec)
    own = (sides.side(number, which, n) for which, n in enumerate(spec.shapes[number]))
    counts = torch.empty(len(left), *((k, 2) if in_turn else (2, k)))
    arrays = (tensor.detach().contiguous().numpy() for tensor in (left, right, scales))
    places = (2, 1) if in_turn else (1, k)
    fill_pairs_cpu(*arrays, *itertools.chain(*own), counts.view(-1, 2 * k).numpy(), *places)
    return counts


def _pieces(left: Tensor, most: int) -> list[tuple[slice, slice]]:
    """Return pieces of samples and tokens, of ``most`` tokens together, one at least."""
    n_samples, n_tokens = left.shape[:2]
    if n_tokens > most:  # of a sample some tokens at a time
        starts = itertools.product(range(n_samples), range(0, n_tokens, max(1, most)))
        return [(slice(b, b + 1), slice(t, t + max(1, most))) for b, t in starts]
    step = max(1, most // max(1, n_tokens))
    return [(slice(b, b + step), slice(0, n_tokens)) for b in range(0, n_samples, step)]


def _transforms(
    spec: ProjectionSpec, number: int, left: Tensor, right: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yield transforms of x + i y of pairs, shape (samples, tokens, k), with which samples."""
    scales, by_kernel = _scales(left, right), left.device.type == "cpu"
    most = _PIECE if by_kernel else _PIECE_OF_GPU
    for part in _pieces(left, most // spec.proj_dim):
        a, b = (side[part].flatten(0, 1).float() for side in (left, right))
        own = scales[part]
        given = spec, number, a, b, own.flatten(0, 1)
        pairs = torch.view_as_complex(_counts(*given, by_kernel=by_kernel, in_turn=True))
        yield part[0], torch.fft.fft(pairs).view(*own.shape[:2], -1)


def _add_squares(into: Tensor, transformed: Tensor, by_kernel: bool) -> None:
    """Add the squares of transforms, shape (samples, tokens, k), over the tokens."""
    if not by_kernel:
        into += transformed.square().sum(1)
        return
    parts = (torch.view_as_real(tensor).flatten(-2) for tensor in (transformed, into))
    add_squares_cpu(*(part.numpy() for part in parts))


def _add_at(out: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add values (b, m) to columns (b, m) or (m,) of rows, in an order that is always the same."""
    columns = columns.expand_as(values)
    if out.device.type == "cpu":
        out.scatter_add_(1, columns, values)
    else:  # sorted, not by atomics
        rows = torch.arange(len(out), device=out.device).unsqueeze(1).expand_as(columns)
        out.index_put_((rows, columns), values, accumulate=True)


def _add_lookups(
    out: Tensor, spec: ProjectionSpec, number: int, indices: Tensor, right: Tensor
) -> None:
    (bucket0, sign0), (bucket1, sign1) = sides_on(spec, right.device)[number]
    columns = (bucket0[indices].unsqueeze(-1) + bucket1) % spec.proj_dim
    values = right.float() * sign1 * sign0[indices].unsqueeze(-1)
    _add_at(out, columns.flatten(1), values.flatten(1))


def add_rows(out: Tensor, blocks: list[Tensor], spec: ProjectionSpec, offset: int) -> None:
    """Add the sketches of formed gradients to ``out``, shape (b, k), as ``project`` has them.

    Blocks have shape (b, n_i), side by side, the first column at the coordinate ``offset``.
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
                (bucket0, sign0), (bucket1, sign1) = sides_on(spec, out.device)[number]
                places = torch.arange(low - first, high - first, device=out.device)
                i, j = places // n1, places % n1
                values = block[:, low - start : high - start].float() * (sign0[i] * sign1[j])
                _add_at(out, (bucket0[i] + bucket1[j]) % spec.proj_dim, values)
            first = last


class OuterProducts:
    """Adds up the sketches of outer products.

    The total is within 1e-6 sum_t |a_t| |b_t| of the definition, the sum over all that was added.

    Attributes:
        rows: Shape (b, k), float32: what was added outside the frequency domain.
        spectrum: Shape (b, k), complex128: sums of squares of transforms.
    """

    def __init__(self, spec: ProjectionSpec, n_samples: int, device: torch.device):
        """Begin with zeros."""
        self.spec = spec
        self.rows = torch.zeros(n_samples, spec.proj_dim, device=device)
        self.spectrum = torch.zeros(n_samples, spec.proj_dim, dtype=torch.complex128, device=device)

    def add_products(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add sum_t left[b, t] right[b, t]^T, part of the gradient of a parameter by its number.

        Shapes are (b, tokens, n0) and (b, tokens, n1).
        """
        for samples, transformed in _transforms(self.spec, number, left, right):
            _add_squares(self.spectrum[samples], transformed, left.device.type == "cpu")

    def add_lookups(self, number: int, indices: Tensor, right: Tensor) -> None:
        """Add sum_t e_indices[b, t] right[b, t]^T likewise, e_i the unit vectors."""
        _add_lookups(self.rows, self.spec, number, indices, right)

    def total(self) -> Tensor:
        """Return the sketches, shape (b, k), float32."""
        return self.rows + (torch.fft.ifft(self.spectrum).imag / 2).float()


@dataclass(frozen=True, slots=True)
class Contractions:
    """Inner products of vectors with the sketch of each outer product by itself.

    A token is sketched once, however many vectors it meets: with the transforms X, Y and V of x, y
    and v, <sketch, v> = Re <X Y, V> / k. As these are real, half of the frequencies say it, and all
    tokens and vectors are one product of matrices. Results are within 1e-6 |a_t| |b_t| |v| of the
    definition.

    Attributes:
        vectors: Shape (m, k), float32.
        spectra: What the parts of products are multiplied by, (m, 2 (k // 2 + 1)), float32.
    """

    spec: ProjectionSpec
    vectors: Tensor
    spectra: Tensor

    @classmethod
    def of(cls, spec: ProjectionSpec, vectors: Tensor) -> Self:
        """Transform the vectors."""
        k = spec.proj_dim
        spectra = torch.view_as_real(torch.fft.rfft(vectors.double())) * (2 / k)
        # A frequency that is its own partner stands for one.
        spectra[:, :: k // 2 if k % 2 == 0 else k] /= 2
        return cls(spec, vectors, spectra.flatten(1).float())

    def prefers_factors(self, n_samples: int, n_pairs: int, n_tokens: int, number: int) -> bool:
        """Return whether that is cheaper than products of the factors with each vector's matrix.

        There are ``n_pairs`` of a text and a vector, and ``n_tokens`` outer products of each text.
        """
        assert self.spec.shapes is not None
        k, (rows, columns) = self.spec.proj_dim, self.spec.shapes[number]
        by_token = _TRANSFORM_NS * k * log2(k + 1) + _COUNT_NS * (rows + columns)
        by_factors = n_tokens * (n_samples * by_token + n_pairs * 2 * k * _PRODUCT_NS)
        read = _COUNT_NS * min(n_pairs, len(self.vectors))
        return by_factors < rows * columns * (n_pairs * n_tokens * _PRODUCT_NS + read)

    def inner_with_products(
        self,
        number: int,
        left: Tensor,
        right: Tensor,
        groups: Sequence[tuple[int, slice]],
        directions: Tensor,
    ) -> Tensor:
        """Return <left[b, t] right[b, t]^T, R v> of pairs of b and v, shape (pairs, tokens).

        Factors are those of ``OuterProducts``. ``groups`` has each b, in order, and which pairs it
        is in; ``directions`` are rows of ``vectors``, shape (pairs,).
        """
        products = self.vectors.new_empty(len(directions), left.shape[1])
        by_kernel = left.device.type == "cpu"
        if len(groups) < len(left):
            met = [b for b, _ in groups]
            left, right = left[met], right[met]
        pairs_of = [pairs for _, pairs in groups]
        scales = left.new_ones(left.shape[0] * left.shape[1], 2, dtype=torch.float32)
        for rows, tokens in _pieces(left, 2 * _PIECE // self.spec.proj_dim):
            a, b = (side[rows, tokens].flatten(0, 1).float() for side in (left, right))
            given = self.spec, number, a, b, scales[: len(a)]
            counts = _counts(*given, by_kernel=by_kernel, in_turn=False)
            transforms = torch.fft.rfft(counts)
            spectra = torch.view_as_real(transforms[:, 0].mul_(transforms[:, 1])).flatten(1)
            own_pairs = pairs_of[rows]
            for pairs, own in zip(own_pairs, spectra.chunk(len(own_pairs)), strict=True):
                products[pairs, tokens] = self.spectra[directions[pairs]] @ own.T
        return products

    def inner_with_lookups(
        self,
        number: int,
        indices: Tensor,
        right: Tensor,
        groups: Sequence[tuple[int, slice]],
        directions: Tensor,
    ) -> Tensor:
        """Return the same of e_indices[b, t] right[b, t]^T, e_i the unit vectors."""
        products = self.vectors.new_empty(len(directions), indices.shape[1])
        for b, own in groups:
            rows = self.vectors.new_zeros(indices.shape[1], self.spec.proj_dim)
            _add_lookups(rows, self.spec, number, indices[b, :, None], right[b, :, None])
            products[own] = self.vectors[directions[own]] @ rows.T
        return products
