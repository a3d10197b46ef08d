"""How far to trust scores: LDS, correlations, baselines, distortion; arrays only."""
