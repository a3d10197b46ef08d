"""Read files whose rows are samples."""
