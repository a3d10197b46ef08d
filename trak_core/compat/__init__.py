"""The Python interface of the package ``trak``, version 0.3.2.

A notebook that uses ``trak`` also runs with ``import trak_core.compat as trak``. Names, arguments,
file names and formulas are the same. ``docs/how-to/from-trak.md`` lists the differences.
"""

from trak_core.compat import (
    gradient_computers,
    modelout_functions,
    projectors,
    savers,
    score_computers,
    utils,
)
from trak_core.compat import traker as traker
from trak_core.compat.traker import TRAKer
from trak_core.compat.utils import test_install

__all__ = ["TRAKer", "test_install", "traker", "utils"]
__all__ += ["gradient_computers", "modelout_functions", "projectors", "savers", "score_computers"]
