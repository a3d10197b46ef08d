"""Measure how well scores predict retrained models, with intervals and baselines."""
