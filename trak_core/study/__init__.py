"""Load the user's study, its samples and its checkpoints, and draw random subsets of samples."""
