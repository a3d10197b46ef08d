"""How far to trust scores: correlations, subset sums, rivals, distortion; arrays only."""
