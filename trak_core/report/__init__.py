"""The report's parts: each turns what artifacts hold into a piece of one self-contained page.

Nothing here reads or writes a file; text is escaped where it becomes HTML (``elements``).
"""

from trak_core.report import _extra as _extra
