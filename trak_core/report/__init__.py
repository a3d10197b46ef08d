"""A study's results for readers: pages of HTML, and a figure of each experiment.

Markup and prose stand in ``templates``, colours and sizes in ``style.css``: a sentence is changed
there. Modules read what artifacts hold (``read_results``) and compute what templates show of it.
"""

# Whoever lacks the extra learns its name before an import of a module here fails.
# ruff: file-ignore[non-empty-init-module]

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"trak_core.report needs {', '.join(_missing)}. Found none: "
        "pip install 'trak-core[workflow]'"
    )
