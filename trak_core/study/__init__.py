"""What the user brings: samples, checkpoints, and what is drawn from them."""
