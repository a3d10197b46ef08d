"""Other settings of scoring that an evaluation measures, each with each. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from trak_core.spec import Combine


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One way from features to scores; see the spec of the scores."""

    damping: float
    loss_weight_power: float
    combine: Combine
    proj_dim: int

    @property
    def weighting(self) -> tuple[float, Combine]:
        """What decides how loss weights come in."""
        return self.loss_weight_power, self.combine


def settings_of(sweep: Mapping[str, Sequence[Any]] | None, own: Setting) -> list[Setting]:
    """Return the settings to measure, sorted; none without a sweep.

    Args:
        sweep: From the config: values of each field but ``combine``, of which all are taken.
        own: The study's own values, which are always among them.
    """
    if sweep is None:
        return []
    values = (
        sorted({*sweep["damping"], own.damping}),
        sorted({*sweep["loss_weight_power"], own.loss_weight_power}),
        sorted(Combine),
        sorted({*sweep["proj_dim"], own.proj_dim}),
    )
    return [Setting(*each) for each in product(*values)]
