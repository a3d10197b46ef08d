"""TRAK data attribution as pure functions over arrays and HDF5 artifacts.

Importing this package is cheap on purpose: every start of Snakemake imports it, so torch, numba
and h5py come in with the modules that use them.
"""

# ruff: file-ignore[non-empty-init-module]

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"


def open(results: str = "results") -> Any:
    """Return what a run left in its results folder, to look at with pandas and to ask.

    ``trak_core.open("results").top("hard", 905)`` gives the strongest training samples of a target,
    ``trak_core.open("results").ask(sample)`` those of a further sample;
    ``trak_core.queries.results_folder.ResultsFolder`` has all that it can be asked.
    """
    # By name: an import statement would make every job depend on what this imports.
    module = import_module("trak_core.queries.results_folder")
    return module.ResultsFolder(Path(results))
