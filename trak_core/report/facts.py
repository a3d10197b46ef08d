"""What the report is told: plain values, already read and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trak_core.spec import EXACT

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One file that the report stands on.

    Attributes:
        name: Its path inside the results folder.
        content_hash: As stored in it.
        provenance: What made it.
        spec: What decided its numbers.
    """

    name: str
    content_hash: str
    provenance: Mapping[str, Any]
    spec: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment's final scores: what is shown of them.

    Attributes:
        name: Of the experiment.
        source: The file.
        unit: Of a score, in words.
        n_train: Training samples.
        saturated: Part of them with a loss weight near 0 at the ends of runs.
        defaults: What the config left open in scoring, and what was taken.
        targets: One a target: id, label, prediction, output, output_sd.
        strongest: The first rows of ``top_influences`` (train_id, train_label, score) by target
            and sign, for the targets that are shown.
        influential: Ids of all training samples in ``top_influences``.
    """

    name: str
    source: Source
    unit: str
    n_train: int
    saturated: float
    defaults: str
    targets: Sequence[Row]
    strongest: Mapping[tuple[Any, int], Sequence[Row]]
    influential: Sequence[Any] = ()

    @property
    def checkpoints(self) -> list[str]:
        """Ids of the checkpoints, in order."""
        return [one["id"] for one in self.source.spec["checkpoints"]]

    @property
    def runs(self) -> Mapping[str, Sequence[str]]:
        """Ids of the checkpoints of every run, in the order they were saved."""
        return self.source.spec["runs"]

    @property
    def relative(self) -> bool:
        """Whether scores have no unit of their own."""
        return self.unit.startswith("relative")


@dataclass(frozen=True, slots=True)
class Matrix:
    """One checkpoint's normal matrix, by its spectrum's ends.

    Attributes:
        checkpoint: Its id.
        source: The file.
        smallest: Eigenvalue.
        largest: Eigenvalue.
        mean_squared_norm: Of the training features, weighted as in the matrix.
        n_train: Rows summed.
    """

    checkpoint: str
    source: Source
    smallest: float
    largest: float
    mean_squared_norm: float
    n_train: int

    def condition(self, damping: float) -> float:
        """Return the condition number with the damping of the scores, 0 for none."""
        added = damping * self.mean_squared_norm
        smallest = max(self.smallest, 0.0) + added
        # At most what float64 can tell.
        return (self.largest + added) / max(smallest, (self.largest + added) * 2.0**-52)


@dataclass(frozen=True, slots=True)
class Error:
    """A relative error of the projection, root mean square.

    Attributes:
        measured: Over samples, or pairs of them, averaged over the streams.
        standard_error: Of that, from how streams differ.
        predicted: What theory says.
    """

    measured: float
    standard_error: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Distortion:
    """What one checkpoint's projection does to lengths and inner products.

    Attributes:
        checkpoint: Its id.
        source: The file.
        n_samples: Training samples compared.
        n_streams: Projection matrices compared.
        squared_norm: Error of squared lengths.
        inner_product: Error of inner products, relative to the product of the lengths.
    """

    checkpoint: str
    source: Source
    n_samples: int
    n_streams: int
    squared_norm: Error
    inner_product: Error


@dataclass(frozen=True, slots=True)
class Timing:
    """What the jobs of one rule took, by Snakemake's own measurement.

    Attributes:
        rule: Its name.
        n_jobs: How many.
        seconds: Of all of them together.
        longest_seconds: Of the longest.
        peak_mib: Largest resident memory of one; None where jobs were too short to measure.
    """

    rule: str
    n_jobs: int
    seconds: float
    longest_seconds: float
    peak_mib: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the evaluation, or another measurement, left in one file (docs/evaluation.md).

    Attributes:
        source: The file.
        tables: The rows of its tables, by name.
        attributes: Its numbers, such as ``n_subsets``.
    """

    source: Source
    tables: Mapping[str, Sequence[Row]]
    attributes: Mapping[str, Any]

    def row(self, table: str, **wanted: Any) -> Row | None:
        """Return the first row of a table with these values; None if there is none."""
        found = (r for r in self.tables[table] if all(r[k] == v for k, v in wanted.items()))
        return next(found, None)


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the report is made from; what was not measured is empty.

    Attributes:
        config: What decides the numbers, from the config.
        experiments: In the config's order.
        matrices: One a checkpoint; none without a projection.
        timings: One a rule that ran.
        evaluations: LDS by experiment.
        removals: By experiment.
        flipped: How well wrong labels were found; at most one.
        self_influence: At most one.
        distortions: One a checkpoint.
    """

    config: Mapping[str, Any]
    experiments: Sequence[Experiment]
    matrices: Sequence[Matrix]
    timings: Sequence[Timing]
    evaluations: Mapping[str, Measured] = field(default_factory=dict)
    removals: Mapping[str, Measured] = field(default_factory=dict)
    flipped: Sequence[Measured] = ()
    self_influence: Sequence[Measured] = ()
    distortions: Sequence[Distortion] = ()

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the config asks for an evaluation that is not there yet."""
        measured = self.evaluations or self.removals or self.flipped or self.self_influence
        return bool(self.config.get("evaluation")) and not measured

    @property
    def awaits_distortion(self) -> bool:
        """Whether the config asks for distortions that are not there yet."""
        return "distortion" in self.config and not self.distortions

    @property
    def checkpoints(self) -> list[str]:
        """Ids of the checkpoints, in order."""
        return self.experiments[0].checkpoints

    @property
    def n_runs(self) -> int:
        """How many trainings the checkpoints come from."""
        return len(self.experiments[0].runs)

    @property
    def n_targets(self) -> int:
        """How many different targets are explained."""
        return len({target["id"] for one in self.experiments for target in one.targets})

    @property
    def projection(self) -> Mapping[str, Any]:
        """The spec of the projection that all scores come from."""
        return self.experiments[0].source.spec["projection"]

    @property
    def exact(self) -> bool:
        """Whether nothing was projected."""
        return self.projection["kind"] == EXACT

    @property
    def damping(self) -> float:
        """Added to normal matrices, in mean squared feature norms."""
        return self.config["scoring"]["damping"]

    @property
    def sources(self) -> list[Source]:
        """Every file that the report stands on."""
        several = [
            *self.experiments,
            *self.matrices,
            *self.evaluations.values(),
            *self.removals.values(),
            *self.flipped,
            *self.self_influence,
            *self.distortions,
        ]
        return [one.source for one in several]
