"""A finished run, looked at with pandas and held in memory to be asked about further samples."""
