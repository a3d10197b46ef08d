"""Compute tensor sketches with torch on any device, from factors or from whole gradients.

A gradient that is a sum of outer products, sum_t a_t b_t^T, can be sketched from its factors a_t
and b_t without being formed. Entry (i, j) is multiplied by sign0[i] sign1[j], and added to column
(bucket0[i] + bucket1[j]) mod k. Therefore the sketch of a b^T is the circular convolution of two
count sketches: x, the sketch of a with the buckets and signs of rows, and y, the sketch of b with
those of columns. The discrete Fourier transform F turns the convolution into a product, so that one
outer product costs O(n0 + n1 + k log k) instead of O(n0 n1). The method of Pham and Pagh is changed
in four ways:

1. One complex transform is enough for both factors, because F(x + i y)^2 is the transform of
   x * x - y * y + 2 i (x * y), where * is the convolution.
2. The squares are summed in the frequency domain over all tokens and parameters. Then each sample
   needs only one inverse transform.
3. Each pair (x, y) is first scaled to equal norms. The unused real part is then no larger than the
   imaginary part and does not increase the rounding error.
4. Buckets are balanced (``reference.py``), so the entries of a factor with at most k entries do not
   collide.

Source: Pham and Pagh, "Fast and scalable polynomial kernels via explicit feature maps", KDD 2013.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from math import log2

import torch
from torch import Tensor

from trak_core.projection.cpu.sketches import add_squares_cpu, fill_pairs_cpu, hashes_of
from trak_core.settings import ProjectionSpec

# The largest number of complex numbers that are transformed in one call. On a CPU, they take 1 MiB,
# which fits into a core's cache. On a GPU, where a call takes 0.2 ms to start, they take 64 MiB, or
# 1/256 of the GPU's memory if that is more.
_PIECE, _PIECE_OF_GPU, _SHARE_OF_GPU = 2**17, 2**23, 256
# Costs in nanoseconds on one core, by which the cheaper method is selected: to sketch factors, or
# whole gradients. They were measured on an AMD EPYC with torch 2.13 for k = 1,024 and 4,096 and
# layers of size 256 to 3,072. ``_CALL_NS`` and ``_LANE_NS`` were chosen on an Intel Xeon from 135
# cases with layers of size 10 to 768 and k = 64 to 4,096. In these cases, the selected method took
# on average 1.02 times as long as the faster method, and at most 1.5 times.
_TRANSFORM_NS = 0.33  # transforming a token's two factors and multiplying them, per k log2(k)
_COUNT_NS = 2.0  # adding one entry of a token's factor to its bucket
_PRODUCT_NS = 0.035  # adding a token's term to one entry of a formed gradient
_CALL_NS = 30_000  # fixed cost of a sketch from factors, for any number of tokens
_LANES, _LANE_NS = 8, 8.0  # adding one entry of the gradients of 8 samples to its bucket


def _token_ns(rows: int, columns: int, proj_dim: int) -> float:
    return _TRANSFORM_NS * proj_dim * log2(proj_dim + 1) + _COUNT_NS * (rows + columns)


def prefers_factors(n_samples: int, n_tokens: int, rows: int, columns: int, proj_dim: int) -> bool:
    """Return whether it is cheaper to sketch gradients from their factors than to form them.

    The ``n_samples`` gradients have shape (rows, columns), and each is a sum of ``n_tokens`` outer
    products. The costs are estimates for one core.
    """
    tiles = -(-n_samples // _LANES)
    by_entry = n_samples * n_tokens * _PRODUCT_NS + tiles * _LANE_NS
    by_factors = _CALL_NS + n_samples * n_tokens * _token_ns(rows, columns, proj_dim)
    return by_factors < rows * columns * by_entry


@lru_cache(maxsize=16)
def _hashes_on(spec: ProjectionSpec, device: torch.device) -> list[Tensor]:
    """Return the buckets and signs of a tensor sketch on a device, as the fields of ``Hashes``."""
    return [torch.from_numpy(x).to(device) for x in hashes_of(spec)]


@lru_cache(maxsize=16)
def _pairs_on(spec: ProjectionSpec, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Return a tuple for each parameter: buckets and signs of its rows, then of its columns."""
    _, shapes, _, *flat = _hashes_on(spec, device)
    pairs = list(zip(*(x.split(shapes.flatten().tolist()) for x in flat), strict=True))
    return [rows + columns for rows, columns in zip(pairs[::2], pairs[1::2], strict=True)]


def entries_of_rows(
    spec: ProjectionSpec, device: torch.device, number: int, rows: Tensor | slice
) -> tuple[Tensor, Tensor]:
    """Return the columns and values of the nonzero entries of R for some rows of a parameter.

    Each entry of the parameter with the given ``number`` has its own row in R, in which a single
    entry is nonzero. Both results have shape (*shape of ``rows``, n1), where n1 is the number of
    columns of the parameter.
    """
    bucket0, sign0, bucket1, sign1 = _pairs_on(spec, device)[number]
    columns = (bucket0[rows].unsqueeze(-1) + bucket1) % spec.proj_dim
    return columns, sign0[rows].unsqueeze(-1) * sign1


@lru_cache(maxsize=2)
def _entries_on(spec: ProjectionSpec, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the index and sign of the entry that is added to each bucket of a count sketch.

    With them, a GPU computes count sketches by indexing. Every k consecutive entries of a factor
    fill the k buckets with one entry each. Each parameter has a pair of tensors (indices, signs) of
    shape (n, k, 2), where n is the number of such groups of entries, and the last index is 0 for
    the left factor and 1 for the right factor. An empty bucket has sign 0.
    """
    k, on_device = spec.proj_dim, []
    for bucket0, sign0, bucket1, sign1 in _pairs_on(spec, torch.device("cpu")):
        n0, n1 = len(bucket0), len(bucket1)
        entries = torch.zeros(-(-max(n0, n1) // k), k, 2, dtype=torch.int32)
        signs = torch.zeros(entries.shape)
        i, j = torch.arange(n0), torch.arange(n1)
        entries[i // k, bucket0, 0], signs[i // k, bucket0, 0] = i.int(), sign0
        entries[j // k, bucket1, 1], signs[j // k, bucket1, 1] = (n0 + j).int(), sign1
        on_device.append((entries.to(device), signs.to(device)))
    return on_device


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cpu"


def _pieces_on(device: torch.device) -> tuple[int, int]:
    """Return how many complex numbers a transform may have for one parameter, and for several."""
    if device.type != "cuda":
        most = _PIECE if _has_kernels(device) else _PIECE_OF_GPU
        return most, most
    n_bytes = torch.cuda.get_device_properties(device).total_memory // _SHARE_OF_GPU
    return max(_PIECE_OF_GPU, n_bytes // 8), _PIECE_OF_GPU


def _fill_counts(
    spec: ProjectionSpec, number: int, left: Tensor, right: Tensor, counts: Tensor, is_complex: bool
) -> None:
    """Write the count sketches x and y of the two factors of each token to ``counts``, float32.

    ``left`` has shape (samples, tokens, n0), and ``right`` has shape (samples, tokens, n1).
    ``counts`` is contiguous. If ``is_complex``, it has shape (tokens, samples, k, 2), for complex
    numbers x + i y, and on a CPU the two factors are first scaled to equal norms. Otherwise, it has
    shape (tokens, samples, 2, k).
    """
    if _has_kernels(left.device):
        fill_pairs_cpu(
            *(factor.detach().float().contiguous().numpy() for factor in (left, right)),
            *(x.numpy() for x in _pairs_on(spec, left.device)[number]),
            counts.flatten(2).numpy(),
            is_complex,
        )
        return
    entries, signs = _entries_on(spec, left.device)[number]
    picked = torch.cat([left, right], dim=2).index_select(2, entries.flatten())
    picked = picked.view(*picked.shape[:2], *entries.shape).transpose(0, 1)
    into = counts if is_complex else counts.mT
    if len(entries) == 1:
        torch.mul(picked[:, :, 0], signs[0], out=into)
    else:
        torch.sum(picked * signs, 2, out=into)


def _balancing_scales(left: Tensor, right: Tensor) -> list[Tensor]:
    """Return two scales for each pair of vectors in ``left`` and ``right``.

    The two vectors, multiplied by their scales, have equal norms. If one of the vectors is 0, both
    scales are 0.
    """
    # In float64, squares do not over- or underflow.
    norms = [torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float64) for x in (left, right)]
    scale = (norms[1] / norms[0]).sqrt_()
    # A vector with NaN or infinity gets the scale 0. Since 0 times NaN or infinity is NaN, the
    # sketch then contains NaN, which is reported.
    return [x.nan_to_num(0, 0, 0).float() for x in (scale, 1 / scale)]


def _pieces(left: Tensor, most: int) -> list[tuple[slice, slice]]:
    """Return pieces of a batch, each as a slice of samples and a slice of tokens.

    A piece has at most ``most`` tokens of all its samples together, but at least one token.
    """
    n_samples, n_tokens = left.shape[:2]
    if n_tokens > most:
        starts = itertools.product(range(n_samples), range(0, n_tokens, max(1, most)))
        return [(slice(b, b + 1), slice(t, t + max(1, most))) for b, t in starts]
    step = max(1, most // max(1, n_tokens))
    return [(slice(b, b + step), slice(0, n_tokens)) for b in range(0, n_samples, step)]


def _add_transforms(counts: Tensor, sums: Tensor) -> None:
    """Add sum_t F(x_t + i y_t)^2 to ``sums``, where F is the discrete Fourier transform.

    The sum is over tokens t. ``counts`` contains the complex numbers x_t + i y_t as pairs, shape
    (tokens, samples, k, 2). ``sums`` has shape (samples, k), complex128.
    """
    if _has_kernels(counts.device):
        transformed = torch.view_as_real(torch.fft.fft(torch.view_as_complex(counts)))
        add_squares_cpu(transformed.flatten(2).numpy(), torch.view_as_real(sums).flatten(1).numpy())
        return
    sums += torch.fft.fft(torch.view_as_complex(counts)).square_().sum(0)


def _add_at(out: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add ``values``, shape (b, m), to the given columns of ``out``, row by row and in order.

    ``columns`` has shape (b, m), or (m,) if it is the same for all rows.
    """
    columns = columns.expand_as(values)
    if out.device.type == "cpu":
        out.scatter_add_(1, columns, values)
    else:  # On a GPU, index_put_ sorts the indices. scatter_add_ would add in a random order.
        rows = torch.arange(len(out), device=out.device).unsqueeze(1).expand_as(columns)
        out.index_put_((rows, columns), values, accumulate=True)


def _add_lookups(
    out: Tensor, spec: ProjectionSpec, number: int, indices: Tensor, right: Tensor
) -> None:
    columns, signs = entries_of_rows(spec, right.device, number, indices)
    _add_at(out, columns.flatten(1), (right.float() * signs).flatten(1))


def _columns_and_signs(
    spec: ProjectionSpec, device: torch.device, bounds: tuple[tuple[int, int], ...]
) -> tuple[Tensor, Tensor]:
    """Return the columns and signs of the nonzero entries in rows of R, given ranges of rows."""
    starts, shapes, positions, buckets, signs = _hashes_on(spec, device)
    coordinates = torch.cat([torch.arange(*bound, device=device) for bound in bounds])
    numbers = torch.searchsorted(starts, coordinates, right=True) - 1
    entries, widths = coordinates - starts[numbers], shapes[numbers, 1]
    i, j = positions[numbers, 0] + entries // widths, positions[numbers, 1] + entries % widths
    return (buckets[i] + buckets[j]) % spec.proj_dim, signs[i] * signs[j]


# If gradients have at most ``_MOST_CACHED`` coordinates, as for biases, the columns and signs of R
# are kept between batches. If they have more than ``_MOST_COORDINATES``, they are processed in
# pieces, to limit memory.
_MOST_CACHED, _MOST_COORDINATES = 2**20, 2**22
_cached_columns_and_signs = lru_cache(maxsize=4)(_columns_and_signs)


def add_rows(out: Tensor, parts: Sequence[tuple[int, Tensor]], spec: ProjectionSpec) -> None:
    """Add the sketches of whole gradients to ``out``, shape (b, k).

    Each part is a pair of a coordinate and the gradients, shape (b, n_i), at the n_i consecutive
    coordinates that begin there.
    """
    pieces = [
        (first + at, block[:, at : at + _MOST_COORDINATES])
        for first, block in parts
        for at in range(0, block.shape[1], _MOST_COORDINATES)
    ]
    while pieces:
        n, taken = 0, 0
        while taken < len(pieces) and n + pieces[taken][1].shape[1] <= _MOST_COORDINATES:
            n, taken = n + pieces[taken][1].shape[1], taken + 1
        bounds = tuple((first, first + block.shape[1]) for first, block in pieces[:taken])
        function = _cached_columns_and_signs if n <= _MOST_CACHED else _columns_and_signs
        columns, signs = function(spec, out.device, bounds)
        values = torch.cat([block for _, block in pieces[:taken]], dim=1)
        _add_at(out, columns, (values * signs).to(out.dtype))
        pieces = pieces[taken:]


class OuterProducts:
    """Compute tensor sketches of sums of outer products, one sum for each sample.

    Terms a_t b_t^T are added by the other methods, and ``total`` returns the sketches. The error of
    a sketch is at most 1e-6 sum_t |a_t| |b_t|, where t runs over all terms of a sample.

    Attributes:
        rows: The sums of the terms that need no Fourier transform, shape (b, k), float32.
        spectrum: The sums of squared Fourier transforms, shape (b, k), complex128.
    """

    def __init__(self, spec: ProjectionSpec, n_samples: int, device: torch.device):
        """Set the sums of all samples to zero."""
        self.spec = spec
        self.rows = torch.zeros(n_samples, spec.proj_dim, device=device)
        self.spectrum = torch.zeros(n_samples, spec.proj_dim, dtype=torch.complex128, device=device)
        # Count sketches that wait to be transformed together with those of other parameters. This
        # saves time if there are few tokens.
        self._held, self._n_held = torch.empty(0, device=device), 0

    def add_products(self, number: int, left: Tensor, right: Tensor) -> None:
        """Add sum_t left[b, t] right[b, t]^T to the gradient of parameter ``number``.

        Shapes are (b, tokens, n0) and (b, tokens, n1).
        """
        assert self.spec.shapes is not None
        k, (n_samples, n_tokens) = self.spec.proj_dim, left.shape[:2]
        has_kernels = _has_kernels(left.device)
        most, most_held = (n // k for n in _pieces_on(left.device))
        # On a GPU, count sketches are computed by indexing. For every k entries of a factor, this
        # takes as much memory as a sketch.
        runs = 1 if has_kernels else -(-max(self.spec.shapes[number]) // k)
        if 2 * runs * n_samples * n_tokens <= most_held:
            if not len(self._held):
                self._held = self.rows.new_empty(most_held // n_samples, n_samples, k, 2)
            if self._n_held + n_tokens > len(self._held):
                self._add_held()
            start, self._n_held = self._n_held, self._n_held + n_tokens
            _fill_counts(self.spec, number, left, right, self._held[start : self._n_held], True)
            return
        for samples, tokens in _pieces(left, most // runs):
            a, b = left[samples, tokens], right[samples, tokens]
            if not has_kernels:
                scales = _balancing_scales(a, b)
                a, b = a * scales[0], b * scales[1]
            counts = self.rows.new_empty(a.shape[1], a.shape[0], k, 2)
            _fill_counts(self.spec, number, a, b, counts, True)
            _add_transforms(counts, self.spectrum[samples])

    def _add_held(self) -> None:
        counts = self._held[: self._n_held]
        if not _has_kernels(counts.device):
            counts *= torch.stack(_balancing_scales(*counts.unbind(3)), dim=3)
        _add_transforms(counts, self.spectrum)
        self._n_held = 0

    def add_lookups(self, number: int, indices: Tensor, right: Tensor) -> None:
        """Add embedding gradients: right[b, t] is added to row indices[b, t] for each token t.

        This is a sum of outer products e_i right[b, t]^T with unit vectors e_i.
        """
        _add_lookups(self.rows, self.spec, number, indices, right)

    def total(self) -> Tensor:
        """Return the sketches, shape (b, k), float32."""
        if self._n_held:
            self._add_held()
        # The imaginary part of sum_t F^-1(F(x_t + i y_t)^2) is 2 sum_t x_t * y_t.
        return self.rows + (torch.fft.ifft(self.spectrum).imag / 2).float()


class Contractions:
    """Compute inner products of given vectors with the sketches of single tokens' gradients.

    The gradient of a token t is an outer product a_t b_t^T, which is sketched once for all vectors.
    Let X, Y and V be the Fourier transforms of the count sketches x of a_t and y of b_t, and of a
    vector v. Then Parseval's theorem gives <sketch, v> = Re <X Y, V> / k. As x, y and v are real,
    half of the frequencies suffice. One matrix product computes the results for all tokens and
    vectors of a sample. The error of a result is at most 1e-6 |a_t| |b_t| |v|.

    Attributes:
        vectors: Shape (m, k), float32.
        spectra: For each vector, the weights of the real and imaginary parts of X Y in the inner
            product, shape (m, 2 (k // 2 + 1)), float32.
    """

    def __init__(self, spec: ProjectionSpec, vectors: Tensor):
        """Compute the Fourier transforms of the vectors, shape (m, k)."""
        k = spec.proj_dim
        spectra = torch.view_as_real(torch.fft.rfft(vectors.double())) * (2 / k)
        # Frequencies 0 and k / 2 have no conjugate partner, so they count once instead of twice.
        spectra[:, :: k // 2 if k % 2 == 0 else k] /= 2
        self.spec, self.vectors = spec, vectors
        self.spectra = spectra.flatten(1).float()

    def prefers_factors(self, n_samples: int, n_pairs: int, n_tokens: int, number: int) -> bool:
        """Return whether sketching tokens is cheaper than multiplying their factors by each R v.

        Here v is a vector and R is the projection matrix. There are ``n_pairs`` pairs of a sample
        and a vector, and ``n_tokens`` outer products in each sample.
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
        """Return <left[b, t] right[b, t]^T, R v> for pairs of a sample b and a vector v.

        ``left`` and ``right`` are factors of the gradient of parameter ``number``, with shapes
        (samples, tokens, n0) and (samples, tokens, n1). Pairs are sorted by sample. ``groups``
        contains, for each sample that occurs, the sample's number and the slice of its pairs.
        ``directions`` contains the index of each pair's vector in ``vectors``. The result has shape
        (pairs, tokens).
        """
        products = self.vectors.new_empty(len(directions), left.shape[1])
        if len(groups) < len(left):
            used = [b for b, _ in groups]
            left, right = left[used], right[used]
        pairs_of = [pairs for _, pairs in groups]
        k = self.spec.proj_dim
        for rows, tokens in _pieces(left, 2 * _PIECE // k):
            a, b = (factor[rows, tokens].flatten(0, 1) for factor in (left, right))
            counts = self.vectors.new_empty(len(a), 1, 2, k)
            _fill_counts(self.spec, number, a[None], b[None], counts, False)
            x, y = torch.fft.rfft(counts).squeeze(1).unbind(1)
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
        """Return ``inner_with_products`` for an embedding, whose left factors are unit vectors.

        The left factor of token t in sample b is the unit vector e_i with i = indices[b, t].
        """
        products = self.vectors.new_empty(len(directions), indices.shape[1])
        for b, pairs in groups:
            rows = self.vectors.new_zeros(indices.shape[1], self.spec.proj_dim)
            _add_lookups(rows, self.spec, number, indices[b, :, None], right[b, :, None])
            products[pairs] = self.vectors[directions[pairs]] @ rows.T
        return products
