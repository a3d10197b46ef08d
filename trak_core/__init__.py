"""Data attribution with TRAK: which training samples made a model predict what it predicts?

    from trak_core import Attributor

    attributor = Attributor(model, "image_classification", checkpoints).fit(train_data)
    scores = attributor.score(target_data)

This package must be fast to import, because Snakemake imports it for every run. Therefore torch,
numba and h5py are imported only by the modules that use them.
"""

# ruff: file-ignore[non-empty-init-module]

from importlib import import_module
from pathlib import Path
from typing import Any

from trak_core.errors import InputError

__version__ = "0.3.0"

# The modules of public classes. They import torch, so each is imported when its class is used.
_PUBLIC = {"Attributor": "attribution.attributor", "Scores": "attribution.scores"}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"trak_core.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'trak_core' has no attribute {name!r}")


def open(results: str | Path = "results") -> Any:
    """Return a finished run of the pipeline as a fitted ``Attributor``.

    ``results`` is the results folder. ``trak_core.open("results").scores("hard").top(10)`` returns
    the ten training samples with the largest scores for each target of the experiment "hard".
    ``trak_core.open("results").score(targets)`` returns the scores for new targets.
    """
    if not Path(results).is_dir():
        raise InputError(
            f"{results}: this must be a folder with the results of a run. Found no folder. Pass "
            "the path of the folder that the config names as `results`.",
            code="artifacts.no_results",
        )
    return import_module("trak_core.queries.open_run").OpenRun(Path(results))
