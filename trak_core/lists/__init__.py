"""Rank training samples by their scores, and sum scores over groups of training samples."""
