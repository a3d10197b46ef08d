"""Render the results of a study as HTML pages, and draw a figure of each experiment.

``templates`` contains the markup and the text, and ``style.css`` the colours and sizes. The module
``read_results`` reads the artifacts. The other modules compute the values that templates show.
"""

# If packages of the extra are missing, this error names the extra before an import fails.
# ruff: file-ignore[non-empty-init-module]

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"trak_core.report needs {', '.join(_missing)}, which must be installed. Run "
        "`pip install 'trak-core[workflow]'`."
    )
