"""Logs without what other libraries tell their own developers, and terminals.

What a study prints and warns of itself stays, and so do messages of the libraries' loggers, which
are about the study's models and data. Whatever the user has set comes first.
"""

import os
import site
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import TextIO

# Libraries look at these when they are imported. Not TQDM_DISABLE: a study's own bars stay.
_NO_BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_OF_THE_FUTURE = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)
_OURS = str(Path(__file__).parents[1])


def _is_installed(filename: str) -> bool:
    """Whether code is Python's own or a library's: not the user's, nor ours."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), "<frozen "]
    return filename.startswith(tuple(folders)) and not filename.startswith(_OURS)


def quiet_libraries() -> None:
    """Have no bars of loading, nor warnings of a future version about a library's own code.

    A warning about the study's code, which a library blames on the line that called it, is shown.
    With ``python -W`` or ``PYTHONWARNINGS`` all are.
    """
    for name in _NO_BARS:
        os.environ.setdefault(name, "1")
    if sys.warnoptions:
        return
    shown = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not (issubclass(category, _OF_THE_FUTURE) and _is_installed(filename)):
            shown(message, category, filename, lineno, file, line)

    warnings.showwarning = show
