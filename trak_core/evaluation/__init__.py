"""How far to trust scores: LDS, correlations, baselines; arrays only."""
