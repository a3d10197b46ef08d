"""Render the results of a study as HTML pages, and a figure of each experiment.

``templates`` has the markup and the text, ``style.css`` the colours and sizes. The modules read
artifacts (``read_results``) and compute the values that templates show.
"""

# Without the extra, this error names it before an import of a module fails.
# ruff: file-ignore[non-empty-init-module]

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"trak_core.report needs {', '.join(_missing)}. Found none: "
        "pip install 'trak-core[workflow]'"
    )
