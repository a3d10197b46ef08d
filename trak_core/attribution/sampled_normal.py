"""Compute the normal matrix of gradients for labels that are drawn from the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg.blas import dsyrk  # pyright: ignore[reportAttributeAccessIssue] -- made at run time

from trak_core.attribution.label_draws import LabelDraws
from trak_core.attribution.loaded_model import LoadedModel
from trak_core.attribution.project_gradients import queued_features
from trak_core.attribution.solve import fill_upper
from trak_core.gradients import Batch, GradientMethod
from trak_core.settings import ProjectionSpec


@dataclass(slots=True)
class SampledNormal:
    """The sum N = 1/S sum_i sum_s phi_is phi_is^T over samples i and S draws s, shape (k, k).

    phi_is = scale R^T B_i^T z_is is a gradient, projected by R. B_i is the derivative of the logits
    with respect to the parameters, and ``ModelOutput.loss_noise`` draws z_is. The expectation of N
    is scale^2 R^T G R, where G is the Gauss-Newton matrix of the training loss. G is the Fisher
    matrix if the loss is minus the log-probability of the label.

    See ``LabelDraws`` for the random numbers. The batch size changes only the rounding.

    Source: Martens, "New Insights and Perspectives on the Natural Gradient Method", JMLR 2020,
        sections 5 and 9.

    Attributes:
        projection: The projection of the gradients.
        n_draws: S, at least 1.
        total: The sum of the terms so far, float64. ``add`` fills the lower triangle.
    """

    projection: ProjectionSpec
    n_draws: int
    total: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        """Begin with zeros."""
        k = self.projection.proj_dim
        self.total = np.zeros((k, k), order="F")

    @property
    def draws(self) -> LabelDraws:
        """The labels that are drawn."""
        return LabelDraws(self.n_draws, self.projection.stream, self.projection.seed)

    def add(
        self,
        method: GradientMethod,
        loaded: LoadedModel,
        batch: Batch,
        ids: Sequence[object],
        threads: int,
    ) -> None:
        """Add the terms of a batch. If an error is raised, the sum is unchanged."""
        given, more = (loaded.model, loaded.parameters), (self.projection, ids, threads)
        parts = [
            queued_features(method, *given, *labelled, *more, loaded.scales).wait()[0]
            for labelled in self.draws.drawn(loaded, batch, ids)
        ]
        rows = np.concatenate(parts).astype(np.float64)
        # The sum is column-major, so that BLAS adds to it without a copy.
        dsyrk(1 / self.n_draws, rows.T, beta=1.0, c=self.total, lower=1, overwrite_c=1)

    def matrix(self) -> np.ndarray:
        """Return N, float64, exactly symmetric. No batch can be added after this call."""
        fill_upper(self.total)
        return self.total
