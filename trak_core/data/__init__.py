"""Read files that have a sample in each row."""
