"""Load the study's model under one checkpoint, and compute features and predictions with it."""
