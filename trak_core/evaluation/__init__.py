"""Measure how well scores predict retrained models, with confidence intervals and baselines.

These modules need only NumPy, SciPy and pandas.
"""
