"""What artifacts hold, as one self-contained page, and as a figure of each experiment.

Markup and prose stand in ``templates``, colours and sizes in ``style.css``: a sentence is mended
there. Modules here read what artifacts hold (``read``), and compute what templates show of it.
"""

from trak_core.report import _extra as _extra
