"""Read a config, a tokenizer or a model of transformers from a folder without code of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trak_core.errors import InputError


def from_folder(read: Callable[..., Any], folder: str | Path, source: Any = None) -> Any:
    """Return what an Auto class of transformers makes of a folder, or of a ``source`` from there.

    ``read`` is the method of the class. A model of which transformers itself has no class needs
    code that lies in the folder; it isn't run, and the folder is an ``InputError``.
    """
    try:
        return read(folder if source is None else source, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            "study_arguments: weights must be of a model whose class is in transformers. Found one "
            f"in {folder} that needs code of its own (`auto_map` in its config), which a "
            "ready-made study never runs. Write a study of your own, whose make_model() loads the "
            "model with trust_remote_code=True.",
            code="studies.custom_code",
        ) from error
