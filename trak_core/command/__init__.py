"""Implement the command ``trak``: ``trak init``, ``trak run`` and ``trak ask``."""
