"""Compute scores: load a model under a checkpoint, features, normal matrix, solve, combine."""
