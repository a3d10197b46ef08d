"""Templates filled in with what they show.

Text is escaped where a template shows it, and a name that a template asks for in vain is an error.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from trak_core.report import numbers, words

_FOLDER = Path(__file__).parent
# How templates write a number: `{{ n | plural("target") }}`.
_FILTERS = (
    *(numbers.number, numbers.signed, numbers.fixed, numbers.percent, numbers.thousands),
    *(numbers.plural, numbers.label, words.of_target, words.of_training_sample),
)


def environment(functions: Sequence[Callable[..., Any]] = ()) -> Environment:
    """Return what fills in templates, whose text may ask for these functions too."""
    made = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update({function.__name__: function for function in _FILTERS})
    made.globals.update({function.__name__: function for function in functions})
    return made


def filled_in(made: Environment, template: str, **shown: Any) -> str:
    """Return a template of this name, without its ``.html.j2``, filled in."""
    return made.get_template(f"{template}.html.j2").render(shown)


def style() -> str:
    """Return the style of every page."""
    return (_FOLDER / "style.css").read_text(encoding="utf-8")
