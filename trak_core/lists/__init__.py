"""Rank training samples in lists, and sum scores over groups of training samples."""
