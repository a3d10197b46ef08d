"""Rank training samples in lists to act on, and sum scores over groups of samples."""
