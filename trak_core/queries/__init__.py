"""Open a finished run as a fitted attributor, and score further samples."""
