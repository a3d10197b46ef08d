"""Load configs, tokenizers and models of transformers, without running code from their folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trak_core.errors import InputError


def from_folder(read: Callable[..., Any], folder: str | Path, source: Any = None) -> Any:
    """Call ``read``, a method of an Auto class, with ``source`` or, if it is None, with ``folder``.

    Returns:
        The config, tokenizer or model.

    Raises:
        InputError: If the model's class is defined by code in the folder, not by transformers.
    """
    try:
        return read(folder if source is None else source, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise InputError(
            "study_arguments: weights must belong to a model whose class is in transformers. Found "
            f"a class that code in {folder} defines (`auto_map` in the config). A ready-made "
            "study never runs such code. Write a study of your own, and load the model in "
            "make_model() with trust_remote_code=True.",
            code="studies.custom_code",
        ) from error
