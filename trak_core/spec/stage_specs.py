"""Frozen dataclasses of all settings that can change a job's numbers: its spec."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from itertools import product
from math import prod
from typing import Any, Self, TypeVar

from trak_core.spec.projection import (
    ProjectionKind,
    ProjectionSpec,
    matrix_shape,
    stream_of,
    usual_kind,
)

# What a config says in place of a projection, and files made without one as its kind.
EXACT = "exact"
# Neither, but the Gauss-Newton matrix of the training loss, in place of that of gradients.
GAUSS_NEWTON = "gauss_newton"
# The split of the training samples; every other one is an experiment's targets.
TRAIN = "train"
# The split of samples to select from, on which nothing was trained.
POOL = "pool"
# The column that says what the one target of an experiment is the mean of.
MEAN_OF = "mean_of"
# What stands there between a mean and the one that is subtracted.
LESS = ", less that of "
# The optimizer's state in a checkpoint's folder, as transformers' Trainer calls it.
OPTIMIZER_FILE = "optimizer.pt"
# The settings in the folder of an adapter, as PEFT calls them.
ADAPTER_CONFIG = "adapter_config.json"


class Weighting(StrEnum):
    """Diagonal W of the normal matrix: 1, or a power of the curvature of the loss in f."""

    PLAIN = "plain"
    CURVATURE = "curvature"


class Combine(StrEnum):
    """How checkpoints and loss weights come together (docs/explanation/scores.md)."""

    PRODUCT_OF_AVERAGES = "product_of_averages"
    AVERAGE_OF_PRODUCTS = "average_of_products"
    UNIT_AVERAGE = "unit_average"

    @property
    def divides_by_norm(self) -> bool:
        """Whether each checkpoint's scores are divided by ||B||."""
        return self is Combine.UNIT_AVERAGE


def curvature_power(weighting: str, power: float, *, is_probability: bool) -> float | None:
    """Return the power of the curvature in W; None for W = 1.

    It is the power of the loss weights where these are probabilities, and 1 elsewhere.

    Source: docs/explanation/scores.md, "The formula".
    """
    if Weighting(weighting) is Weighting.PLAIN:
        return None
    return power if is_probability else 1


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way from features to scores, measured by an evaluation (explanation/scores.md)."""

    damping: float
    loss_weight_power: float
    combine: Combine
    proj_dim: int

    @property
    def loss_weighting(self) -> tuple[float, Combine]:
        """How loss weights come in: their power, and how checkpoints are combined."""
        return self.loss_weight_power, self.combine


def settings_of(sweep: Mapping[str, Sequence[Any]] | None, own: Setting) -> list[Setting]:
    """Return the settings to measure, each value with each, sorted; none without a sweep.

    A sweep has values of each field except ``combine``, whose values are all taken; the study's
    ``own`` setting is always among them.
    """
    if sweep is None:
        return []
    values = {**sweep, "combine": Combine}
    names = [field.name for field in fields(Setting)]
    return [
        Setting(*each)
        for each in product(*(sorted({*values[name], getattr(own, name)}) for name in names))
    ]


def ordered(value: Any) -> Any:
    """Return plain values with the keys of every mapping sorted, and tuples as lists.

    Snakemake compares the text of a job's params: the order of keys in a config must not count.
    """
    if isinstance(value, Mapping):
        return {str(key): ordered(value[key]) for key in sorted(value, key=str)}
    return [ordered(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturesSpec:
    """What decides the numbers of features, or of a Gramian or embeddings.

    It is a param of the rule, is written into the file, and is compared where files are combined.
    Without checkpoint and split it holds for all of them.

    Attributes:
        model_output: Name of the model output f.
        parameter_patterns: Patterns of names of the parameters to differentiate; None for all.
        projection: The config's keys of it, without ``kind`` where the model's size decides; or
            ``{"kind": "exact"}``, or ``gauss_newton``.
        dtype: How features are stored.
        study_digest: Hash of the study's source and data files.
        preconditioner: ``adam`` where gradients are divided by the root of the optimizer's second
            moments; None for gradients as they are.
        split: ``train``, or the name of an experiment.
        targets_digest: Hash of the experiment's target ids; None for the training samples.
        state_dicts: Which of a checkpoint's weights are taken, by its id, where the config says so;
            None where it says none.
    """

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

    def under(self, checkpoint: str) -> Self:
        """Return the same of one checkpoint."""
        part = (self.state_dicts or {}).get(checkpoint)
        return replace(self, checkpoint=checkpoint, state_dicts=part and {checkpoint: part})

    def of(self, split: str, targets_digest: str | None = None) -> Self:
        """Return the same of one split; the training samples have no digest of targets."""
        return replace(self, split=split, targets_digest=targets_digest)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return ordered(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalSpec:
    """What decides one checkpoint's normal matrix.

    Attributes:
        features: What decides the features that it is made of.
        weighting: ``plain`` or ``curvature``.
        curvature_power: Power of the curvature in W; None with ``plain``.
        norm_power: Power of the loss weights in ||B||, by which scores are divided; None where they
            are not.
        normalize: Whether the training samples' features are divided by their lengths.
    """

    features: FeaturesSpec
    weighting: str
    curvature_power: float | None = None
    norm_power: float | None = None
    normalize: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, those of the features among them."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        features = own.pop("features")
        return ordered(features.as_dict() | own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresSpec(NormalSpec):
    """What decides scores: of one checkpoint, or with ``runs`` of their average.

    All that decides the normal matrix is part of it; ``features`` names a checkpoint or none.

    Attributes:
        damping: Relative damping, at least 0.
        experiment: Name of the experiment; None for self-influences.
        targets_digest: Hash of its target ids.
        runs: Ids of the checkpoints of every run, in the order they were saved; None for one
            checkpoint's scores.
        combine: How checkpoints and loss weights come together; None for one checkpoint's.
        loss_weight_power: In (0, 1]; None for one checkpoint's.
        pool_digest: Hash of the pool whose samples are scored; None for the training samples.
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
        """Ids of all checkpoints, sorted: the order of files of all of them."""
        assert self.runs is not None
        return sorted(checkpoint for run in self.runs.values() for checkpoint in run)

    @property
    def ends(self) -> list[str]:
        """Ids of the last checkpoint of every run, sorted: what is shown of models is theirs."""
        assert self.runs is not None
        return sorted(run[-1] for run in self.runs.values())

    @property
    def along_runs(self) -> list[str]:
        """Ids of all checkpoints, so that the first few come from as many runs and times as can be.

        Runs take turns: the first run's last checkpoint, the next run's last but one, and so on.
        """
        assert self.runs is not None
        rounds = max(len(run) for run in self.runs.values())
        return [
            run[-1 - (first + turn) % len(run)]
            for turn in range(rounds)
            for first, run in enumerate(self.runs.values())
            if turn < len(run)
        ]

    def under(self, checkpoint: str) -> Self:
        """Return the same of one checkpoint, which no average decides."""
        features = self.features.under(checkpoint)
        return replace(self, features=features, runs=None, combine=None, loss_weight_power=None)

    def of_train(self) -> FeaturesSpec:
        """Return what the training samples' features must be."""
        return self.features.of(TRAIN)

    def of_pool(self) -> FeaturesSpec:
        """Return what the features of the pool's samples must be."""
        return self.features.of(POOL, self.pool_digest)

    def of_self_influence(self) -> Self:
        """Return what self-influences by the same settings must be."""
        return replace(self, experiment=None, targets_digest=None, pool_digest=None)

    def of_normal_matrix(self) -> NormalSpec:
        """Return what the normal matrix must be, of one checkpoint's scores."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(NormalSpec)}
        own["features"] = self.of_train()
        return NormalSpec(**own)

    def of_targets(self) -> FeaturesSpec:
        """Return what the targets' features must be."""
        assert self.experiment is not None
        return self.features.of(self.experiment, self.targets_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedSpec:
    """What decides models that are retrained on parts of the training data.

    Attributes:
        subsets: Which parts: ``random``, ``without random`` samples (and everything), ``without
            top`` ones by scores or by a baseline, or ``list`` (everything, by a list, at random).
        arguments: What the study's ``train`` is called with, besides ``seed`` and ``data``.
        model_output: Name of the model output f, which is kept of every target.
        seeds: Trainings on each subset.
        seed: Seed of draws and trainings.
        n_removed: How many samples removals take out, each number on its own; below 1, which part.
        draws: How many random removals of each number.
        fraction: Part of the training samples that a random subset keeps.
        run_seeds: Seeds of runs, shared by all subsets: then ``arguments`` are those of the runs,
            and ``train`` gets ``sample_weights`` in place of ``data``. None where
            every subset has seeds of its own.
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
    run_seeds: Sequence[int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, ready for JSON."""
        return ordered(asdict(self))


def subset_size(n_train: int, fraction: float) -> int:
    """Return how many training samples are a fraction of them, rounded down."""
    return int(n_train * fraction + 1e-9)  # .29 x 100 is a little less than 29


def removed_sizes(n_removed: Sequence[float], n_train: int) -> list[int]:
    """Return how many samples removals take out: numbers as they are, parts below 1 rounded.

    A part is at least one sample; equal sizes count once.
    """
    parts = (n if n >= 1 else max(1, round(n * n_train)) for n in n_removed)
    return list(dict.fromkeys(map(int, parts)))


def projection_of(spec: FeaturesSpec, shapes: Sequence[Sequence[int]]) -> ProjectionSpec:
    """Return the projection of one checkpoint's gradients; ``usual_kind`` if the spec has no kind.

    The shapes are of the parameters that are differentiated, in order.
    """
    assert spec.checkpoint is not None
    matrices = [matrix_shape(shape) for shape in shapes if prod(shape)]
    n_params = sum(map(prod, matrices))
    given = {"kind": usual_kind(n_params, spec.projection["proj_dim"]), **spec.projection}
    try:
        of_matrices = ProjectionKind(given["kind"]).about.of_matrices
    except ValueError:  # which ProjectionSpec explains
        of_matrices = False
    return ProjectionSpec(
        **given,
        n_params=n_params,
        stream=stream_of(spec.checkpoint),
        shapes=matrices if of_matrices else None,
    )


Spec = TypeVar("Spec", FeaturesSpec, NormalSpec, ScoresSpec, RetrainedSpec)


def parse_spec(kind: type[Spec], plain: Mapping[str, Any]) -> Spec:
    """Return the spec whose ``as_dict`` the plain values are."""
    if not issubclass(kind, NormalSpec):
        return kind(**plain)
    own = plain.keys() & {field.name for field in fields(kind)}
    features = FeaturesSpec(**{key: plain[key] for key in plain.keys() - own})
    return kind(features=features, **{key: plain[key] for key in own})
