"""Load checkpoints, compute features and normal matrices, and compute scores from them."""
