"""Gradients of a few samples under one checkpoint, and what is made of them some at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trak_core.gradients import Batch, GradientMethod, formed_gradients, in_chunks
from trak_core.model.features import Features
from trak_core.model.load import LoadedModel
from trak_core.model.sample_order import StoredSamples
from trak_core.spec import ProjectionSpec
from trak_core.system.progress import with_progress
from trak_core.trust.distortion import peakedness
from trak_core.trust.sketch_distortion import sketch_peakedness

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampledGradients:
    """Gradients of n samples, computed whenever they are asked for.

    Attributes:
        loaded: What they are gradients of.
        samples: The samples.
        method: From ``gradient_method``.
        chunk: Samples differentiated at once.
    """

    loaded: LoadedModel
    samples: StoredSamples
    method: GradientMethod
    chunk: int

    def _each(
        self, use: Callable[[Batch], T], start: int, stop: int
    ) -> Iterator[tuple[int, int, T]]:
        """Yield start and stop of chunks of samples, and what ``use`` makes of them."""

        def used(first: int, last: int) -> T:
            return use(self.samples.rows(slice(start + first, start + last)))

        for first, last, made in in_chunks(used, stop - start, self.chunk):
            yield start + first, start + last, made

    def features(self, projections: Sequence[ProjectionSpec], threads: int) -> np.ndarray:
        """Project them by several matrices.

        Args:
            projections: Of one proj_dim k.
            threads: For the projection.

        Returns:
            Scaled features, shape (len(projections), n, k), float32.
        """
        what = self.loaded.model, self.loaded.parameters, self.loaded.output

        def projected(batch: Batch) -> list[np.ndarray]:
            sums = Features.zeros(self.loaded.parameters, projections, len(batch), threads)
            self.method(*what, batch, sums)
            return [rows.cpu().numpy() for rows in sums.scaled()]

        n = len(self.samples)
        features = np.empty((len(projections), n, projections[0].proj_dim), np.float32)
        chunks = self._each(projected, 0, n)
        for first, last, rows in with_progress(chunks, n, "samples projected"):
            features[:, first:last] = rows
        return features

    def peakedness(self, projection: ProjectionSpec, held: int) -> np.ndarray:
        """Return the peakedness of all pairs (see ``trak_core.trust.distortion``), shape (n, n).

        Args:
            projection: Of these gradients; of a kind that keeps something.
            held: Samples whose gradients are kept while the others' go by; changes nothing but the
                time.
        """
        what = self.loaded.model, self.loaded.parameters, self.loaded.output

        def whole(batch: Batch) -> np.ndarray:
            blocks = formed_gradients(self.method, *what, batch).blocks()
            return np.concatenate([block.float().cpu().numpy() for block in blocks], axis=1)

        n = len(self.samples)
        peaks = np.empty((n, n))
        starts = range(0, n, held)
        if len(starts) > 1:
            print(
                f"Notice: beside those in work, {held} of {n} gradients fit compute.memory_mb; "
                f"each is computed {(len(starts) + 1) / 2:.3g} times on average.",
                flush=True,
            )
        for start in starts:
            stop = min(start + held, n)
            kept = np.empty((stop - start, projection.n_params), np.float32)
            for first, last, rows in self._each(whole, start, stop):
                kept[first - start : last - start] = rows
            peaks[start:stop, start:stop] = peaks_of(kept, kept, projection)
            for first, last, rows in self._each(whole, stop, n):
                part = peaks_of(kept, rows, projection)
                peaks[start:stop, first:last], peaks[first:last, start:stop] = part, part.T
        return peaks


def peaks_of(x: np.ndarray, y: np.ndarray, projection: ProjectionSpec) -> np.ndarray:
    """Return the peakedness of gradients, shape (n, p) and (m, p), under a kind of projection."""
    if projection.shapes is not None:
        return sketch_peakedness(x, y, projection.shapes, projection.proj_dim)
    block = projection.lossless_block
    return np.zeros((len(x), len(y))) if block is None else peakedness(x, y, block)
