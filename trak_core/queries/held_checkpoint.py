"""Keep a checkpoint of a finished run in memory: its model, and all that new samples meet."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from trak_core.artifacts import (
    FEATURES,
    GRAMIAN,
    NORMAL_MATRIX,
    Artifact,
    ArtifactError,
    Rows,
    made_for,
    open_artifact,
)
from trak_core.attribution.batch_by_length import subset
from trak_core.attribution.chosen_ways import Ways, chosen_way, read_ways
from trak_core.attribution.device import find_device, full_precision
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import batch_features, projecting_device, stored_rows
from trak_core.attribution.scores import powered, similarities
from trak_core.attribution.solve import DampedGramian, damped_factor, divide_by_lengths
from trak_core.attribution.token_scores import (
    Between,
    Cut,
    count_tokens,
    cut_scores,
    divided_by_lengths,
)
from trak_core.config.memory_needs import exact_need, scores_need
from trak_core.gradients import check_labels
from trak_core.queries.finished_run import FinishedRun
from trak_core.spec import EXACT, ProjectionSpec, ScoresSpec, projection_of
from trak_core.stages._shared import Damped, normal_weights, read_rows
from trak_core.study.dataset_split import Split
from trak_core.study.study import Study

# A_c of one sample, shape (n, 1), float32; its label's number and ``PerSample.columns``; and its
# features, shape (1, k), float64, where there are some.
SampleScores = tuple[np.ndarray, list[Tensor], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class _ProjectedScorer:
    """Features of the training samples, and the factor of their damped normal matrix.

    Attributes:
        ways: Ways to gradients that the run has chosen.
        values: Phi_c, shape (n, k), in memory or in its file; it is read by blocks of ``block``
            rows, whose lengths are 1 if ``normalized``.
        factor: Cholesky's, in the lower triangle, shape (k, k), float64.
    """

    projection: ProjectionSpec
    dtype: str
    ways: Ways
    n_classes: int | None
    values: Rows
    normalized: bool
    n_train: int
    block: int
    factor: np.ndarray

    def score_sample(self, loaded: LoadedModel, asked: Split, memory_mb: int) -> SampleScores:
        """Return A_c of one sample, as ``compute_features`` and ``compute_scores`` have it."""
        (samples,) = loaded.ordered(asked)
        loaded = loaded.in_pieces(samples, memory_mb)
        batch = loaded.batch(samples, 0, 1)
        check_labels(batch.labels, loaded.output, self.n_classes, asked.ids)
        loaded.blocks.stop()  # which a longer question may have started
        with samples.naming_longest():
            loaded.memory(batch, memory_mb).room(loaded.device, memory_mb)
        method = chosen_way(loaded, batch, self.ways)
        given = loaded.model, loaded.parameters, loaded.output, batch
        features, columns = batch_features(
            method, *given, self.projection, asked.ids, torch.get_num_threads(), loaded.scales
        )
        target = stored_rows(features, self.dtype, asked.ids).astype(np.float64)
        solved = scipy.linalg.cho_solve((self.factor, True), target.T)
        starts = range(0, self.n_train, self.block)
        rows = read_rows(self.values, normalize=self.normalized)
        blocks = [similarities(rows(i, min(i + self.block, self.n_train)), solved) for i in starts]
        return np.concatenate(blocks).astype(np.float32), columns, target

    def cut(
        self,
        loaded: LoadedModel,
        pairs: tuple[Split, Split],
        features: tuple[np.ndarray, np.ndarray],
        batch_size: int,
        memory_mb: int,
    ) -> tuple[Cut, Cut]:
        """Return scores of some training samples for one sample by tokens, as a job cuts them.

        ``features`` are those of the training samples, (rows, k), and of the sample, (1, k).
        """
        phi, target = features
        phi, lengths = divided_by_lengths(phi, normalize=self.normalized)
        both = np.concatenate([phi, target])
        solved = scipy.linalg.cho_solve((self.factor, True), both.T).T
        loaded.blocks.stop()  # as above
        places = [(row, 0) for row in range(len(phi))]
        between = Between(*pairs, solved[:-1], solved[-1:], lengths, places)
        return cut_scores(loaded, self.projection, between, batch_size, memory_mb, self.ways)


@dataclass(frozen=True, slots=True)
class _ExactScorer:
    """The damped Gramian of the training samples, which are read again for every sample.

    Attributes:
        shares: What inner products with the training samples are multiplied by, shape (n, 1).
    """

    train: Split
    batch_size: int
    damped: DampedGramian
    shares: np.ndarray

    def score_sample(self, loaded: LoadedModel, asked: Split, memory_mb: int) -> SampleScores:
        """Return A_c of one sample, as ``compute_gramian`` and ``compute_exact_scores`` have it."""
        cross, columns = inner_products(loaded, self.train, asked, self.batch_size, memory_mb)
        return self.damped.similarities(cross * self.shares).astype(np.float32), columns, None


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """One checkpoint, ready for samples.

    Attributes:
        weights: Q^power of the training samples, shape (n,), float64.
        norm: ||B||; 1 where scores are not divided by it.
        about_train: ``labels``, ``outputs`` and ``predictions`` of the training samples.
        n_bytes: Memory that it takes, with the model and the training samples' features.
        work_bytes: Memory that making it ready takes.
    """

    loaded: LoadedModel
    weights: np.ndarray
    norm: float
    about_train: dict[str, np.ndarray]
    n_bytes: int
    work_bytes: int
    scorer: _ProjectedScorer | _ExactScorer

    def in_memory(self) -> Self:
        """Return it with the training samples' features, not read again for every sample."""
        if isinstance(self.scorer, _ExactScorer):
            return self
        held: Rows = self.scorer.values[:]  # pyright: ignore[reportAssignmentType]
        return replace(self, scorer=replace(self.scorer, values=held))

    def score_sample(self, asked: Split, memory_mb: int) -> SampleScores:
        """Return A_c of one sample, and what the checkpoint makes of it.

        ``memory_mb`` must hold its gradient.
        """
        return self.scorer.score_sample(self.loaded, asked, memory_mb)

    def has_tokens(self, asked: Split) -> bool:
        """Return whether a sample's scores can be cut by its tokens."""
        (samples,) = self.loaded.ordered(asked)
        return count_tokens(self.loaded.batch(samples, 0, 1), self.loaded) > 0

    def cut(
        self, train: Split, places: Sequence[int], asked: Split, target: np.ndarray, memory_mb: int
    ) -> tuple[Cut, Cut]:
        """Return scores for one sample, of the training samples at some places, cut by tokens.

        ``target`` are its features, from ``score_sample``.
        """
        scorer = self.scorer
        assert isinstance(scorer, _ProjectedScorer)
        phi = np.concatenate([scorer.values[i : i + 1] for i in places]).astype(np.float64)
        pairs = train.take([train.ids[i] for i in places]), asked
        return scorer.cut(self.loaded, pairs, (phi, target), len(places), memory_mb)


def device_of(name: str, *, is_projected: bool) -> torch.device:
    """Return the device that a config names, as a job of its kind takes it."""
    return projecting_device(name) if is_projected else full_precision(find_device(name))


@contextlib.contextmanager
def held_checkpoint(
    run: FinishedRun, name: str, study: Study, train: Split, device: torch.device
) -> Generator[HeldCheckpoint, None, None]:
    """Give a checkpoint with its model, after making sure that all belongs to today's config.

    ``train`` are the training samples of the study, which is loaded.

    Yields:
        The checkpoint; the file of its training samples stays open.
    """
    spec = run.specs.self_influence.under(name)
    is_projected = run.specs.is_projected
    run.check_scores()
    with open_artifact(run.train_file(name), FEATURES if is_projected else GRAMIAN) as file:
        run.check_today(file.path, *made_for(file, spec.of_train()))
        if file.ids("sample_ids") != train.ids:
            run.refuse_changed(file.path, "list of training samples")
        loaded = LoadedModel.of(study, run.checkpoint(name), spec.of_train(), device)
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        tensors += (loaded.scales or {}).values()
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        power = run.specs.self_influence.loss_weight_power
        assert power is not None
        weights = powered(file.vector("loss_weights"), power)
        about = {key: file.vector(key) for key in ("labels", "outputs", "predictions")}
        if not is_projected:
            run.check_today(
                file.path, loaded.file_spec(spec.of_train(), {"kind": EXACT}), file.spec
            )
            scorer, norm = _exact(run, file, spec, train)
            n_bytes += 2 * scorer.damped.gramian.nbytes
            work = exact_need(len(weights), 1).fixed_bytes
        else:
            shapes = [parameter.shape for parameter in loaded.parameters.values()]
            projection = projection_of(spec.features, shapes)
            whole = loaded.file_spec(spec.of_train(), projection.scaled())
            run.check_today(file.path, whole, file.spec)
            scorer, norm = _projected(run, name, file, spec, loaded, train, projection)
            n_bytes += scorer.values[:1].nbytes * scorer.n_train + scorer.factor.nbytes
            work = scores_need(projection.proj_dim, 1).fixed_bytes
        divisor = 1.0 if norm is None else norm
        yield HeldCheckpoint(loaded, weights, divisor, about, n_bytes, work, scorer)


def _exact(
    run: FinishedRun, file: Artifact, spec: ScoresSpec, train: Split
) -> tuple[_ExactScorer, float | None]:
    gramian = file.matrix("gramian")[:]
    shares = np.ones((len(gramian), 1))
    weights = normal_weights(file, spec.curvature_power)
    if spec.normalize:
        divide_by_lengths(gramian, shares)
    damped = DampedGramian.factorize(gramian, weights, spec.damping)
    norm = None
    if spec.norm_power is not None:
        norm = damped.train_norm(powered(file.vector("loss_weights"), spec.norm_power))
    # One sample of any study is in memory only while its block is.
    return _ExactScorer(train, run.specs.config["compute"]["batch_size"], damped, shares), norm


def _projected(
    run: FinishedRun,
    name: str,
    file: Artifact,
    spec: ScoresSpec,
    loaded: LoadedModel,
    train: Split,
    projection: ProjectionSpec,
) -> tuple[_ProjectedScorer, float | None]:
    path = run.normal_matrix(name)
    with open_artifact(path, NORMAL_MATRIX) as matrix:
        try:
            damped = Damped.read(matrix, file, spec)
        except ArtifactError:
            run.refuse_changed(path, "scoring, or of other features")
    factor = damped_factor(damped.matrix, damped.ridge, damped.ends)
    values, memory_mb = file.matrix("features"), run.specs.config["compute"]["memory_mb"]
    n_train = len(values)
    (samples,) = loaded.ordered(subset(train, range(1)))
    loaded = loaded.in_pieces(samples, memory_mb)
    _, n_classes = loaded.few(samples)
    block = scores_need(projection.proj_dim, 1).rows(memory_mb)
    scorer = _ProjectedScorer(
        projection,
        spec.features.dtype,
        read_ways(run.gradient_method, spec.of_train()),
        n_classes,
        values,
        spec.normalize,
        n_train,
        block,
        factor,
    )
    return scorer, damped.norm
