"""Measure how far scores can be trusted: LDS, intervals, baselines. NumPy and SciPy only."""
