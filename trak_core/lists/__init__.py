"""Act on scores: lists of training samples to look at, and sums over groups of samples."""
