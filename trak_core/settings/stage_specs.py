"""Specs of the kinds of jobs. A spec contains all settings that can change a job's results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import product
from math import prod
from typing import Any, ClassVar, Self, TypeVar

from trak_core.settings.projection import (
    ProjectionKind,
    ProjectionSpec,
    matrix_shape,
    stream_of,
    usual_kind,
)

# The value of a projection's ``kind`` in configs and files if gradients are not projected.
EXACT = "exact"
# The names of two sets of samples ("splits"): the training samples, and the new samples from which
# `lists.select` chooses. Every other split contains an experiment's targets.
TRAIN, POOL = "train", "pool"
OPTIMIZER_FILE = "optimizer.pt"  # the optimizer's state in a checkpoint folder of transformers
ADAPTER_CONFIG = "adapter_config.json"  # the settings in an adapter folder of PEFT


class Weighting(StrEnum):
    """The weights of samples in the normal matrix.

    A weight is 1, or a power of the second derivative of the loss with respect to the model output.
    """

    PLAIN = "plain"
    CURVATURE = "curvature"


class Combine(StrEnum):
    """How scores are computed from several checkpoints (docs/explanation/scores.md)."""

    PRODUCT_OF_AVERAGES = "product_of_averages"
    AVERAGE_OF_PRODUCTS = "average_of_products"
    UNIT_AVERAGE = "unit_average"

    @property
    def divides_by_norm(self) -> bool:
        """Whether each checkpoint's scores are divided by their norm over the training samples."""
        return self is Combine.UNIT_AVERAGE


def curvature_power(weighting: str, power: float, *, is_probability: bool) -> float | None:
    """Return the power of the curvature in the weights of samples, or None for equal weights.

    If the loss weights are probabilities (``is_probability``), the result is ``power``, the power
    of the loss weights. Otherwise, it is 1.
    """
    if Weighting(weighting) is Weighting.PLAIN:
        return None
    return power if is_probability else 1


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One combination of scoring settings. An evaluation compares several combinations."""

    damping: float
    loss_weight_power: float
    combine: Combine
    proj_dim: int

    @property
    def loss_weighting(self) -> tuple[float, Combine]:
        """The settings that determine how loss weights are used."""
        return self.loss_weight_power, self.combine


def settings_of(sweep: Mapping[str, Sequence[Any]], configured: Setting) -> list[Setting]:
    """Return all combinations of the values in a sweep, sorted.

    The sweep is extended by the config's own values, ``configured``, and all values of ``combine``.
    """
    values = {**sweep, "combine": Combine}
    names = [field.name for field in fields(Setting)]
    columns = [sorted({*values[name], getattr(configured, name)}) for name in names]
    return [Setting(*row) for row in product(*columns)]


def ordered(value: Any) -> Any:
    """Return plain values with sorted keys and lists in place of tuples.

    Snakemake compares the params of jobs as text, so equal settings must have equal texts.
    """
    if isinstance(value, Mapping):
        return {str(key): ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesSpec:
    """The settings that determine features, a Gramian or embeddings.

    The settings are a param of the Snakemake rule, and are stored in the file. When files are
    combined, their settings are compared.

    Attributes:
        model_output: Name of the model output.
        parameter_patterns: Patterns for the names of the parameters with respect to which the model
            output is differentiated. None for all parameters.
        projection: The projection in the config, without ``kind`` if the model's size determines
            the kind, or ``{"kind": "exact"}`` if gradients are not projected.
        dtype: The dtype of stored features.
        study_digest: Hash of the study's source and data files.
        preconditioner: ``adam`` if gradients are divided by the square root of the optimizer's
            second moments, else None.
        checkpoint: Id of the checkpoint. None for all checkpoints.
        split: ``train``, ``pool``, or the name of an experiment. None for all splits.
        targets_digest: Hash of the experiment's target ids. None for the training samples.
        state_dicts: For each checkpoint id, the path of keys to the state dict in the checkpoint.
            None if the config does not select a state dict.
        label_draws: The number of labels drawn for each training sample to compute the normal
            matrix. 0 if the normal matrix is computed from the features.
        precision: The precision of float32 products, ``highest`` or ``high``.
    """

    # Fields that were added in later versions. ``as_dict`` omits them if they have these values, so
    # that files of earlier versions, which lack the fields, remain valid.
    LEFT_OUT: ClassVar[Mapping[str, Any]] = {"label_draws": 0, "precision": "highest"}

    model_output: str
    parameter_patterns: Sequence[str] | None
    projection: Mapping[str, Any]
    dtype: str
    study_digest: str
    preconditioner: str | None = None
    checkpoint: str | None = None
    split: str | None = None
    targets_digest: str | None = None
    state_dicts: Mapping[str, str] | None = None
    label_draws: int = 0
    precision: str = "highest"

    @property
    def is_exact(self) -> bool:
        """Whether gradients are not projected."""
        return self.projection.get("kind") == EXACT

    def under(self, checkpoint: str) -> Self:
        """Return these settings for the features of one checkpoint."""
        state_dict = (self.state_dicts or {}).get(checkpoint)
        state_dicts = state_dict and {checkpoint: state_dict}
        return replace(self, checkpoint=checkpoint, state_dicts=state_dicts)

    def of(self, split: str, targets_digest: str | None = None) -> Self:
        """Return these settings for one split. The training samples have no ``targets_digest``."""
        # Without a projection, a target's file also contains products with the gradients at drawn
        # labels. The projected features of targets do not depend on drawn labels.
        draws = self.label_draws if split == TRAIN or self.is_exact else 0
        return replace(self, split=split, targets_digest=targets_digest, label_draws=draws)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON, without those that equal ``LEFT_OUT``."""
        values = ordered(asdict(self))
        return {k: v for k, v in values.items() if k not in self.LEFT_OUT or v != self.LEFT_OUT[k]}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalSpec:
    """The settings that determine a checkpoint's normal matrix.

    Attributes:
        features: The settings of the features.
        weighting: How training samples are weighted, ``plain`` or ``curvature``.
        curvature_power: Power of the curvature in the weights. None for ``plain``.
        norm_power: Power of the loss weights in the norm by which scores are divided. None if
            scores are not divided.
        normalize: Whether the training samples' features are divided by their norms.
    """

    features: FeaturesSpec
    weighting: str
    curvature_power: float | None = None
    norm_power: float | None = None
    normalize: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, and the fields of ``features``, as plain values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ordered(values.pop("features").as_dict() | values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresSpec(NormalSpec):
    """The settings that determine the scores of one checkpoint or, with ``runs``, of all.

    Attributes:
        damping: Damping in units of the weighted mean of the features' squared norms, at least 0.
        experiment: Name of the experiment. None for self-influences.
        targets_digest: Hash of the experiment's target ids.
        runs: For each run, the ids of its checkpoints in the order of saving. For the scores of one
            checkpoint, ``runs``, ``combine`` and ``loss_weight_power`` are None.
        combine: How checkpoints and loss weights are combined.
        loss_weight_power: Power of the loss weights, in (0, 1].
        pool_digest: Hash of the pool if its samples are scored. None for the training samples.
    """

    damping: float
    experiment: str | None = None
    targets_digest: str | None = None
    runs: Mapping[str, Sequence[str]] | None = None
    combine: str | None = None
    loss_weight_power: float | None = None
    pool_digest: str | None = None

    @property
    def checkpoints(self) -> list[str]:
        """The sorted ids of all checkpoints. Lists with a file for each have this order."""
        assert self.runs is not None
        return sorted(checkpoint for run in self.runs.values() for checkpoint in run)

    @property
    def ends(self) -> list[str]:
        """The sorted ids of the last checkpoint of each run.

        Tables of results contain the model outputs of these checkpoints.
        """
        assert self.runs is not None
        return sorted(run[-1] for run in self.runs.values())

    @property
    def along_runs(self) -> list[str]:
        """The ids of all checkpoints, ordered so that the first ones differ in run and time."""
        assert self.runs is not None
        rounds = max(len(run) for run in self.runs.values())
        return [
            run[-1 - (first + turn) % len(run)]
            for turn in range(rounds)
            for first, run in enumerate(self.runs.values())
            if turn < len(run)
        ]

    def under(self, checkpoint: str) -> Self:
        """Return these settings for the scores of one checkpoint."""
        features = self.features.under(checkpoint)
        return replace(self, features=features, runs=None, combine=None, loss_weight_power=None)

    def of_train(self) -> FeaturesSpec:
        """Return the settings of the training samples' features."""
        return self.features.of(TRAIN)

    def of_pool(self) -> FeaturesSpec:
        """Return the settings of the features of the pool's samples."""
        return self.features.of(POOL, self.pool_digest)

    def of_self_influence(self) -> Self:
        """Return these settings for self-influences, which have no targets."""
        return replace(self, experiment=None, targets_digest=None, pool_digest=None)

    def of_normal_matrix(self) -> NormalSpec:
        """Return the settings of the normal matrix from which these scores are computed."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(NormalSpec)}
        values["features"] = self.of_train()
        return NormalSpec(**values)

    def of_targets(self) -> FeaturesSpec:
        """Return the settings of the targets' features."""
        assert self.experiment is not None
        return self.features.of(self.experiment, self.targets_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedSpec:
    """The settings that determine models retrained on subsets of the training samples.

    Attributes:
        subsets: The kind of subset, such as ``random``. ``stages/retrain.py`` describes the kinds.
        arguments: Arguments of the study's ``train`` other than ``seed`` and ``data``.
        model_output: Name of the model output, which is stored for every target.
        seeds: Number of training runs on each subset.
        seed: Seed from which the subsets and the seeds of training are drawn.
        n_removed: Numbers of training samples to remove. A value below 1 is the fraction of all
            training samples.
        draws: Number of random removals of each size.
        fraction: Fraction of the training samples in a random subset.
    """

    subsets: str
    arguments: Mapping[str, Any]
    model_output: str
    study_digest: str
    seeds: int
    seed: int
    n_removed: Sequence[float] = ()
    draws: int = 0
    fraction: float = 0.5

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return ordered(asdict(self))


def subset_size(n_train: int, fraction: float) -> int:
    """Return the size of a subset with a ``fraction`` of the training samples, rounded down."""
    return int(n_train * fraction + 1e-9)  # In float64, 0.29 * 100 is slightly less than 29.


def removed_sizes(n_removed: Sequence[float], n_train: int) -> list[int]:
    """Return the numbers of samples to remove. Values below 1 are fractions of ``n_train``."""
    sizes = (n if n >= 1 else max(1, round(n * n_train)) for n in n_removed)
    return list(dict.fromkeys(map(int, sizes)))


def projection_of(spec: FeaturesSpec, shapes: Sequence[Sequence[int]]) -> ProjectionSpec:
    """Return the projection of one checkpoint's gradients, given the shapes of its parameters."""
    assert spec.checkpoint is not None
    matrices = [matrix_shape(shape) for shape in shapes if prod(shape)]
    n_params = sum(map(prod, matrices))
    values = {"kind": usual_kind(n_params, spec.projection["proj_dim"]), **spec.projection}
    # This is False for an unknown kind, for which ProjectionSpec then raises an error.
    of_matrices = any(k == values["kind"] and k.about.of_matrices for k in ProjectionKind)
    return ProjectionSpec(
        **values,
        n_params=n_params,
        stream=stream_of(spec.checkpoint),
        shapes=matrices if of_matrices else None,
    )


Spec = TypeVar("Spec", FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec)


def parse_spec(kind: type[Spec], plain: Mapping[str, Any]) -> Spec:
    """Return the spec of class ``kind`` whose ``as_dict()`` returned these values."""
    if not issubclass(kind, NormalSpec):
        return kind(**plain)
    names = plain.keys() & {field.name for field in fields(kind)}
    features = FeaturesSpec(**{key: plain[key] for key in plain.keys() - names})
    return kind(features=features, **{key: plain[key] for key in names})
