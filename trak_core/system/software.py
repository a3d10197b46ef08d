"""What made an artifact, for its ``provenance``: no clock times and no host names."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from trak_core import __version__


def software(
    code: str, device: str, *packages: str, made_from: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return versions, code digest and device as plain values.

    Args:
        code: The stage's code digest.
        device: ``cpu``, or ``cuda`` and the device's name.
        *packages: Distributions that the numbers depend on.
        made_from: Provenance of the files that went in; equal ones are kept once.
    """
    made = {
        "trak-core": __version__,
        "python": platform.python_version(),
        "code": code,
        "device": device,
        **{package: version(package) for package in packages},
    }
    once = [one for i, one in enumerate(made_from) if one not in made_from[:i]]
    return made | {"made_from": once} if once else made
