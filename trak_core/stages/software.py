"""What made an artifact, for its ``provenance``: no clock times and no host names."""

import platform
from importlib.metadata import version

from trak_core import __version__


def software(code: str, device: str, *packages: str) -> dict[str, str]:
    """Return versions, code digest and device as plain values.

    Args:
        code: The stage's code digest.
        device: ``cpu``, or ``cuda`` and the device's name.
        *packages: Distributions that the numbers depend on.
    """
    return {
        "trak-core": __version__,
        "python": platform.python_version(),
        "code": code,
        "device": device,
        **{package: version(package) for package in packages},
    }
