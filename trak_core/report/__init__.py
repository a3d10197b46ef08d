"""A study's results for readers: pages of HTML, and a figure of each experiment.

Markup and prose stand in ``templates``, colours and sizes in ``style.css``: a sentence is changed
there. The modules read what artifacts hold (``read``) and compute what templates show of it.
"""

# The name of the extra comes before any import that would fail without it.
# ruff: file-ignore[module-import-not-at-top-of-file, non-empty-init-module]

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"trak_core.report needs {', '.join(_missing)}. Found none: "
        "pip install 'trak-core[workflow]'"
    )

from trak_core.report.charts import influences_figure
from trak_core.report.read import (
    File,
    Results,
    read_distortion,
    read_evaluation,
    read_experiment,
    read_flipped,
    read_matrix,
    read_removals,
    read_self_influence,
    read_timings,
)
from trak_core.report.render import answer, report
from trak_core.report.samples import (
    BEGINNING,
    EACH,
    Examples,
    find_examples,
    printed,
    readable,
    targets_shown,
)

__all__ = [
    "BEGINNING",
    "EACH",
    "Examples",
    "File",
    "Results",
    "answer",
    "find_examples",
    "influences_figure",
    "printed",
    "read_distortion",
    "read_evaluation",
    "read_experiment",
    "read_flipped",
    "read_matrix",
    "read_removals",
    "read_self_influence",
    "read_timings",
    "readable",
    "report",
    "targets_shown",
]
