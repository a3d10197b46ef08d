"""A finished run, opened as an attributor: its scores, and answers about further samples."""
