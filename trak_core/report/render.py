"""The report: what was found, put into the templates beside this module."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import Environment

from trak_core.evaluation.distortion import spread_norm_sd
from trak_core.model_outputs.table import TABLE
from trak_core.report import conditions, evaluation, how_to_read, run, warnings
from trak_core.report.examples import EACH, Examples
from trak_core.report.facts import Facts
from trak_core.report.markup import environment, filled_in, style

# What templates may ask for: `{% for chart in lds_charts(measured) %}`.
_FUNCTIONS = (
    *(how_to_read.worked_example, run.config_text, run.versions),
    *(evaluation.trust, evaluation.ranked, evaluation.lds_charts, evaluation.per_target),
    *(evaluation.removals_chart, spread_norm_sd, conditions.distortion_charts),
)


@cache
def _environment() -> Environment:
    made = environment(_FUNCTIONS)
    made.globals["limits"] = warnings.LIMITS
    return made


def rendered(template: str, **shown: Any) -> str:
    """Return a template of this name, without its ``.html.j2``, filled in."""
    return filled_in(_environment(), template, **shown)


def document(facts: Facts, examples: Sequence[Examples]) -> str:
    """Return the report as one HTML document.

    Args:
        facts: All that is known.
        examples: Targets with their strongest training samples, by experiment.
    """
    return rendered(
        "page",
        facts=facts,
        output=TABLE[facts.config["model_output"]],
        warnings=warnings.study_warnings(facts),
        examples=examples,
        each=EACH,
        style=style(),
    )
