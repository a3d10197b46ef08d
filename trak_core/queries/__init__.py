"""Open a finished run, read its scores, and score new samples with its checkpoints."""
