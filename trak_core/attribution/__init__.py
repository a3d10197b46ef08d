"""Load checkpoints, compute features and normal matrices, solve for targets, and average scores."""
