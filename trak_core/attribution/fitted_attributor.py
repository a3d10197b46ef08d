"""The base class of attributors, which compute scores from stored features or Gramians."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trak_core.artifacts import (
    FEATURES,
    GRAMIAN,
    NORMAL_MATRIX,
    Artifact,
    ArtifactError,
    Rows,
    open_artifact,
)
from trak_core.attribution.device import Compute, float32_precision
from trak_core.attribution.fitted_checkpoint import (
    DampedGradients,
    MemoryPart,
    read_normal_matrix,
    read_rows,
    self_influences,
    similarity_rows,
)
from trak_core.attribution.gradient_method_record import Methods, method_for, recorded_methods
from trak_core.attribution.inner_products import inner_products
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.score_formulas import checkpoint_weights
from trak_core.attribution.scores import Scores
from trak_core.attribution.solve import DampedMatrix
from trak_core.attribution.token_scores import SplitScores, count_tokens, split_pairs, token_tables
from trak_core.attribution.write_features import feature_blocks, projection_for
from trak_core.config.memory_needs import exact_need
from trak_core.errors import InputError
from trak_core.gradients import Batch, GradientMethod
from trak_core.runtime.progress import progress_bar
from trak_core.settings import EXACT, FeaturesSpec, ScoresSpec
from trak_core.study.dataset_split import Split
from trak_core.study.given_data import split_digest, split_of_data
from trak_core.study.show_samples import sample_as_html
from trak_core.study.study import Study

_COLUMNS = ("labels", "outputs", "predictions", "loss_weights")


def stored_columns(file: Artifact) -> dict[str, np.ndarray]:
    """Return a file's labels, outputs, predictions, loss weights and any curvatures, by name."""
    keys = [*_COLUMNS, *["curvature"] * file.has("curvature")]
    return {key: file.vector(key) for key in keys}


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded checkpoint, and the results of ``Attributor.fit`` that are needed to score targets.

    Attributes:
        train: The training samples.
        columns: The ``stored_columns`` of the training samples.
        norm: The norm by which this checkpoint's scores are divided. None for no division.
        damped: The factorized damped normal matrix or, for exact scores, damped Gramian.
        features: The training samples' features, in a file or in memory. None for exact scores.
    """

    loaded: LoadedModel
    spec: ScoresSpec
    train: Split
    columns: Mapping[str, np.ndarray]
    norm: float | None
    damped: DampedMatrix | DampedGradients
    features: Rows | np.ndarray | None = None

    @property
    def n_bytes(self) -> int:
        """The memory in bytes of the model, the factorized matrix, and the features or Gramian."""
        tensors = [*self.loaded.model.parameters(), *self.loaded.model.buffers()]
        n_bytes = sum(tensor.nbytes for tensor in tensors)
        if isinstance(self.damped, DampedGradients):
            return n_bytes + 2 * self.damped.damped.gramian.nbytes
        assert self.features is not None
        return n_bytes + self.features[:1].nbytes * len(self.features) + self.damped.factor.nbytes

    def score(self, targets: Split, compute: Compute) -> MemoryPart:
        """Return this checkpoint's contribution to the scores of all training samples for targets.

        It contains labels, outputs, predictions and the matrix A = Phi (N + ridge I)^-1 T^T. Phi
        and T are the features of training samples and targets, and N is the normal matrix. For
        exact scores, Phi and T are gradients that are not projected, and each call computes the
        gradients of all training samples again.
        """
        if isinstance(self.damped, DampedGradients):
            values, columns = self._exact(targets, self.damped, compute)
            rows = read_rows(values)
        else:
            assert self.features is not None
            target_phi, columns = self._target_features(targets, compute)
            phi = read_rows(self.features, normalize=self.spec.normalize)
            rows = similarity_rows(phi, self.damped.solve(target_phi.T))
        arrays = [(c.float() if c.is_floating_point() else c).cpu().numpy() for c in columns]
        own = dict(zip(_COLUMNS, arrays, strict=False))
        vectors = {"loss_weights": self.columns["loss_weights"]}
        for side, split, values in (("train", self.train, self.columns), ("target", targets, own)):
            vectors[f"{side}_ids"] = np.array(split.ids)
            vectors |= {f"{side}_{key}": values[key] for key in _COLUMNS[:3]}
        return MemoryPart(rows, vectors, self.norm or 1.0)

    def _exact(
        self, targets: Split, gradients: DampedGradients, compute: Compute
    ) -> tuple[np.ndarray, list[Tensor]]:
        """Return A (see ``score``) from gradients that are not projected, float32.

        Also return the targets' labels, outputs and predictions.
        """
        exact_need(len(gradients.damped.gramian), len(targets.ids)).check(compute.memory_mb)
        if not self.loaded.reproduces(self.train, self.columns):
            raise InputError(
                "With `projection: exact`, the training samples and the model must be the same in "
                "`score` as in `fit`. Found different model outputs for training samples. Call "
                "`fit` again.",
                code="attribution.changed_data",
            )
        given = self.loaded, self.train, targets, self.spec.features, compute
        cross, columns = inner_products(*given)
        return gradients.similarities(cross).astype(np.float32), columns

    def _target_features(self, targets: Split, compute: Compute) -> tuple[np.ndarray, list[Tensor]]:
        """Return the targets' features (m, k), float64, and their labels, outputs and predictions.

        Features are rounded to the dtype in which the training samples' features are stored.
        """
        given = self.loaded, targets, self.spec.features, compute
        _, _, features, columns = zip(*feature_blocks(*given, must_differ=False), strict=True)
        joined = [torch.cat(parts) for parts in zip(*columns, strict=True)]
        return np.concatenate(features).astype(np.float64), joined

    def split_pairs(
        self, train: Sequence[int], targets: Split, pairs: np.ndarray, compute: Compute
    ) -> SplitScores:
        """Return the scores of pairs, split by tokens and by layers.

        A pair consists of a training sample and a target. ``train`` contains indices of training
        samples. A row of ``pairs``, shape (pairs, 2), contains a position in ``train`` and a
        position in ``targets``.
        """
        assert isinstance(self.damped, DampedMatrix)
        assert self.features is not None
        (samples,) = self.loaded.ordered(targets)
        if not count_tokens(self.loaded.batch(samples, 0, 1), self.loaded):
            raise InputError(
                "Scores can be split by tokens only if samples are texts. Found targets that are "
                "not texts.",
                code="attribution.no_tokens",
            )
        target_phi, _ = self._target_features(targets, compute)
        phi = np.concatenate([self.features[row : row + 1] for row in train]).astype(np.float64)
        splits = self.train.select(train), targets
        given = self.loaded, self.spec, self.damped, splits, (phi, target_phi), pairs, compute
        return split_pairs(*given)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of an attributor, its training samples, and the folder with its files."""

    spec: ScoresSpec
    compute: Compute
    train: Split | None = None
    folder: Path = Path()
    study: Study | None = None
    train_digest: str | None = None  # a hash of the training samples for exact scores


class FittedAttributor(ABC):
    """The base class of ``Attributor`` and of finished runs (``trak_core.open``)."""

    _setup: Setup

    def __init__(self) -> None:
        self._describe: Callable[[Any], str] | None = None
        # The scorers that are kept in memory, by checkpoint, and whether all of them fit.
        self._held: dict[str, Scorer] = {}
        self._holds = True
        # Each public method closes the files of its scorers when it ends.
        self._files = ExitStack()

    @property
    def _compute(self) -> Compute:
        return self._setup.compute

    @property
    def _train(self) -> Split:
        if self._setup.train is None:
            raise InputError(
                "An attributor must be fitted before it scores. Call `fit(train_data)` first.",
                code="attribution.not_fitted",
            )
        return self._setup.train

    @property
    def checkpoints(self) -> list[str]:
        """The ids of the checkpoints, sorted."""
        return self.settings.checkpoints

    @property
    def settings(self) -> ScoresSpec:
        """All settings that determine the scores, including defaults."""
        return self._setup.spec

    def score(
        self,
        target_data: Any,
        *,
        ids: Iterable[int | str] | None = None,
        keep: Literal["full", "top_k"] = "full",
        top: int = 20,
    ) -> Scores:
        """Return the scores of all training samples for targets.

        Args:
            target_data: The samples whose predictions to explain, in any form that ``fit`` accepts.
            ids: An id for each target. None for 0, 1, 2, ...
            keep: ``"full"`` to keep the scores of all training samples for all targets.
                ``"top_k"`` to keep only each target's largest positive and negative scores, which
                needs less memory. ``Scores.frame`` is then not available.
            top: The number of positive and of negative scores to keep for each target.
        """
        if keep not in {"full", "top_k"}:
            raise InputError(
                f"`keep` must be full or top_k. Found {keep!r}.", code="attribution.scoring"
            )
        targets = split_of_data(target_data, ids)
        known = self._setup.train_digest
        if known is not None and known != split_digest(self._train):
            raise InputError(
                "With `projection: exact`, `score` computes the gradients of the training samples "
                "again, so they must be the same samples as in `fit`. Found changed samples. Call "
                "`fit` again.",
                code="attribution.changed_data",
            )
        n_steps = len(targets.ids) if self._is_projected else len(self._train.ids)

        def parts_of_checkpoints() -> list[MemoryPart]:
            # Scorers are not assigned to a variable, so each is freed before the next is read.
            return [
                self._scorer(name).score(targets, self._compute_beside_held(name))
                for name in self.checkpoints
            ]

        with self._reading():
            with progress_bar("score", len(self.checkpoints) * n_steps) as bar, bar.counting():
                parts = self._retry_with_memory(parts_of_checkpoints)
            return Scores.of_parts(
                parts,
                self.settings,
                keep=keep,
                top=top,
                memory_mb=self._compute.memory_mb,
                show=self._show_function(targets),
                samples=targets,
                setup=self._setup,
            )

    def self_influence(self) -> pd.DataFrame:
        """Return a table of the self-influences of training samples.

        The self-influence of a sample is the absolute value of its score for itself. A large
        self-influence means that the model memorized the sample. Memorized samples often have wrong
        labels.

        The table is indexed by id and has columns ``label``, ``prediction``, ``output`` and
        ``self_influence``. This method is not available with ``projection="exact"``.
        """
        self._check_projected("Self-influences")
        features, matrices = (
            [f(c) for c in self.checkpoints] for f in (self._features, self._normal_matrix)
        )
        n_steps = len(self.checkpoints) * len(self._train.ids)
        with self._reading(), progress_bar("self-influence", n_steps) as bar, bar.counting():
            columns, _ = self_influences(features, matrices, self.settings, self._compute.memory_mb)
        return pd.DataFrame(columns).set_index("id")

    def tokens(self, scores: Scores, top: int = 10) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Split the scores of each target's top training samples by tokens and by layers.

        A score is the inner product of a vector and a sample's gradient. The gradient is a sum of
        terms, each of which belongs to a token and a layer. The score of a token or layer is the
        inner product of the same vector and the sum of its own terms. Samples must be texts.

        Args:
            scores: A result of ``score`` of this attributor.
            top: The number of positive and of negative scores to split for each target. It must not
                exceed the number that ``score`` kept.

        Returns:
            Two tables. The first has columns ``target_id``, ``train_id``, ``side`` (``train`` or
            ``target``, the text to which the token belongs), ``token`` (from 0; -1 for terms that
            belong to no token) and ``score``. The second has columns ``target_id``, ``train_id``,
            ``layer`` and ``score``. For each side, the tokens' scores sum to the score of the pair.
        """
        self._check_projected("Scores by tokens")
        if scores.samples is None or scores.setup is not self._setup:
            raise InputError(
                "Scores can be split by tokens only by the attributor that computed them, and not "
                "after another `fit`. Found scores of another fit or attributor, or scores from a "
                "file or from pickle. Call `score` again.",
                code="attribution.no_tokens",
            )
        pairs = pd.concat([scores.top(top), scores.bottom(top)], ignore_index=True)
        pairs = pairs.rename(columns={"target": "target_id", "train": "train_id"})
        targets = scores.samples.take([*dict.fromkeys(pairs["target_id"].tolist())])
        with self._reading():
            return self._retry_with_memory(lambda: self._split_by_tokens(pairs, targets))

    def _at_work(self) -> AbstractContextManager[Any]:
        """Return a context in which samples and checkpoints can be read.

        A finished run overrides this method, because the run's paths are relative to its folder.
        """
        return nullcontext()

    @contextmanager
    def _reading(self) -> Generator[None, None, None]:
        """Enter the context of ``_at_work``. On exit, close the files that scorers read."""
        with self._at_work(), self._files:
            yield

    @abstractmethod
    def _load(self, name: str) -> LoadedModel:
        """Return the model with the weights of a checkpoint."""

    @abstractmethod
    def _refuse(self, path: Path, keys: Sequence[str]) -> NoReturn:
        """Raise an error, because the file ``path`` has other values for the settings ``keys``."""
        raise NotImplementedError

    # The paths are the same as in the results of a run, so that a finished run can be opened.

    def _features(self, name: str) -> Path:
        kind = "features" if self._is_projected else "gramian"
        return self._setup.folder / kind / name / "train.h5"

    def _normal_matrix(self, name: str) -> Path:
        return self._setup.folder / "normal_matrix" / f"{name}.h5"

    def _open_features(self, name: str) -> AbstractContextManager[Artifact]:
        kind = FEATURES if self._is_projected else GRAMIAN
        return open_artifact(self._features(name), kind)

    @property
    def _is_projected(self) -> bool:
        return not self.settings.features.is_exact

    def _check_projected(self, noun: str) -> None:
        if not self._is_projected:
            raise InputError(
                f"{noun} need a random projection. Found `projection: "
                f"{self.settings.features.projection['kind']}`. Choose another projection.",
                code="attribution.no_features",
            )

    def _method_for(
        self, loaded: LoadedModel, few: Batch, *, reads_terms: bool = False
    ) -> GradientMethod:
        method = method_for(loaded, few, self._methods, reads_terms=reads_terms)
        for conditions, (name, _) in self._methods.items():  # Print each notice only once.
            self._methods[conditions] = name, None
        return method

    @cached_property
    def _methods(self) -> Methods:
        return recorded_methods(self._setup.folder, self.settings.features)

    def _differing_keys(self, name: str, loaded: LoadedModel, file: Artifact) -> list[str]:
        """Return the names of settings that have other values in a checkpoint's ``file``."""
        own = self.settings.under(name).of_train()
        projection = projection_for(loaded, own).scaled() if self._is_projected else {"kind": EXACT}
        # A file stores a key of LEFT_OUT only if its value differs from the default. If
        # ``loaded.file_spec`` lacks such a key, the file must lack it, too (None).
        expected = dict.fromkeys(FeaturesSpec.LEFT_OUT) | loaded.file_spec(own, projection)
        return [key for key in expected if expected[key] != file.spec.get(key)]

    def _retry_with_memory(self, compute: Callable[[], Any]) -> Any:
        """Return ``compute()``. If memory runs out, free all scorers and call ``compute`` again."""
        with float32_precision(self.settings.features.precision):
            try:
                return compute()
            except InputError as error:
                of_memory = error.code in {"gradients.memory_limit", "config.memory"}
                if not (of_memory and self._holds and self._held):
                    raise
                self._held, self._holds = {}, False
                return compute()

    def _compute_beside_held(self, name: str) -> Compute:
        """Return the device and the memory limits for computing gradients.

        If the checkpoint's scorer is kept in memory, ``memory_mb`` is halved, because the scorers
        that are kept may take the other half.
        """
        memory_mb = self._compute.memory_mb // (1 + (self._holds and name in self._held))
        return replace(self._compute, memory_mb=memory_mb)

    def _scorer(self, name: str) -> Scorer:
        """Return a checkpoint's scorer. If the scorer has a file open, ``_files`` will close it."""
        scorer = self._held.get(name) or self._read_scorer(name)
        if isinstance(scorer.features, Rows):
            self._files.callback(scorer.features.artifact.close)
        return scorer

    def _read_scorer(self, name: str) -> Scorer:
        """Return the scorer of a checkpoint, after loading the model and reading files.

        Scorers are kept in memory if the scorers of all checkpoints fit into half of ``memory_mb``.
        If there is only one checkpoint and its scorer does not fit, the scorer is kept without
        features. Features are then read from the file.
        """
        # The attributor refers to the scorer. If the scorer referred to the attributor, too, Python
        # would free both of them late. Therefore the scorer gets a weak reference.
        owner = weakref.proxy(self)
        loaded = replace(
            self._load(name), method_of=lambda *given, **more: owner._method_for(*given, **more)
        )
        own = self.settings.under(name)
        with self._open_features(name) as file:
            differ = self._differing_keys(name, loaded, file)
            if not differ and file.ids("sample_ids") != self._train.ids:
                differ = ["sample_ids"]
            if differ:
                self._refuse(file.path, differ)
            given = loaded, own, self._train, stored_columns(file)
            if self._is_projected:
                with open_artifact(self._normal_matrix(name), NORMAL_MATRIX) as matrix:
                    try:
                        damped, norm = read_normal_matrix(matrix, file, own)
                    except ArtifactError:
                        self._refuse(matrix.path, ["scoring"])
                scorer = Scorer(*given, norm, damped, file.matrix("features"))
            else:
                gradients = DampedGradients.read(file, own)
                scorer = Scorer(*given, gradients.norm, gradients)
            needed = len(self.checkpoints) * scorer.n_bytes
            self._holds &= needed <= self._compute.memory_mb * 2**19
            if self._holds and scorer.features is not None:
                scorer = replace(scorer, features=scorer.features[:])
        if self._holds or len(self.checkpoints) == 1:
            self._held[name] = scorer
        return scorer

    def _show_function(self, targets: Split) -> Callable[[bool, Any], str]:
        train, study, describe = self._train, self._setup.study, self._describe
        rows = [{sample_id: i for i, sample_id in enumerate(s.ids)} for s in (train, targets)]

        def show(is_target: bool, sample_id: Any) -> str:
            split, row = (train, targets)[is_target], rows[is_target][sample_id]
            with self._at_work():
                return sample_as_html(split.samples[row], sample_id, study, describe)

        return show

    def _split_by_tokens(
        self, pairs: pd.DataFrame, targets: Split
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the two tables that ``tokens`` returns, for ``pairs`` and their ``targets``."""
        train_of, train_ids = pd.factorize(pairs["train_id"])
        target_of, _ = pd.factorize(pairs["target_id"])
        positions = np.column_stack([train_of, target_of])
        row_of = {sample_id: row for row, sample_id in enumerate(self._train.ids)}
        rows = [row_of[train_id] for train_id in train_ids.tolist()]
        split_scores, loss_weights, norms = [], [], []
        n_steps = len(self.checkpoints) * (len(rows) + 2 * len(targets.ids))
        with progress_bar("tokens", n_steps) as bar, bar.counting():
            for name in self.checkpoints:
                scorer = self._scorer(name)
                compute = self._compute_beside_held(name)
                split_scores.append(scorer.split_pairs(rows, targets, positions, compute))
                loss_weights.append(scorer.columns["loss_weights"][rows])
                norms.append(scorer.norm or 1.0)
                del scorer  # to free its memory before the next scorer is read
        weights = checkpoint_weights(np.stack(loss_weights), np.array(norms), self.settings)
        return token_tables(pairs, split_scores, weights[:, train_of])
