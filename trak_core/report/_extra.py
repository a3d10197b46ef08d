"""The report draws and fills in templates with packages that the library does without."""

from importlib.util import find_spec

_missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"trak_core.report needs {', '.join(_missing)}. Found none: "
        "pip install 'trak-core[workflow]'"
    )
