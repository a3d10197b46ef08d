"""The page: what was found, put into the templates beside this module.

Text is escaped where a template shows it, and a name that a template asks for in vain is an error.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trak_core.model_outputs.table import TABLE
from trak_core.report import conditions, evaluation, how_to_read, numbers, run, warnings
from trak_core.report.examples import EACH, Examples
from trak_core.report.facts import Facts
from trak_core.trust.distortion import spread_norm_sd

_FOLDER = Path(__file__).parent
# How templates write a number: `{{ n | plural("target") }}`.
_FILTERS = (
    *(numbers.number, numbers.signed, numbers.fixed, numbers.percent, numbers.thousands),
    *(numbers.plural, numbers.label),
)
# What templates may ask for: `{% for chart in lds_charts(measured) %}`.
_FUNCTIONS = (
    *(how_to_read.worked_example, run.config_text, run.versions),
    *(evaluation.trust, evaluation.ranked, evaluation.lds_charts, evaluation.per_target),
    *(evaluation.removals_chart, spread_norm_sd, conditions.distortion_charts),
)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update({function.__name__: function for function in _FILTERS})
    environment.globals.update({function.__name__: function for function in _FUNCTIONS})
    environment.globals["limits"] = warnings.LIMITS
    return environment


def rendered(template: str, **shown: Any) -> str:
    """Return a template of this name, without its ``.html.j2``, filled in."""
    return _environment().get_template(f"{template}.html.j2").render(shown)


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
        style=(_FOLDER / "style.css").read_text(encoding="utf-8"),
    )
