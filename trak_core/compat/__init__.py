"""Offer the Python interface of TRAK (the package ``trak``, version 0.3.2) over this library.

``import trak_core.compat as trak`` moves a notebook here. ``docs/how-to/from-trak.md`` says what
differs. Names, arguments, files and formulas are those of the original. Its scale differs from the
pipeline's: projections are unscaled, and features are gradients over sqrt(p).
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
