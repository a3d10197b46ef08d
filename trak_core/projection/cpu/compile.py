"""Compiling a kernel for the CPU once, for every process after.

Numba keeps compiled code on disk until the kernel's own file changes. It does not notice a change
in another module that the kernel took a function from, so here every state of the projection's
source has a folder of its own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit

from trak_core.provenance import code_digest


def _cache_folder() -> Path:
    base = os.environ.get("NUMBA_CACHE_DIR") or Path(__file__).with_name("__pycache__")
    return Path(base, code_digest("trak_core.projection.cpu.slices"))


_CACHE_FOLDER = _cache_folder()


def compiled(function: Callable[..., Any]) -> Any:
    """Decorate a function to be compiled at its first call; it releases the interpreter's lock.

    The code is kept in the folder that NUMBA_CACHE_DIR names, else beside this file, else, where
    that cannot be written, in the user's cache.

    Returns:
        Numba's dispatcher, called as the function is.
    """
    # A setting of Numba that it reads when it decorates.
    before = config.CACHE_DIR  # pyright: ignore[reportAttributeAccessIssue]
    config.CACHE_DIR = str(_CACHE_FOLDER)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        return njit(cache=True, nogil=True, boundscheck=False, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before  # pyright: ignore[reportAttributeAccessIssue]
