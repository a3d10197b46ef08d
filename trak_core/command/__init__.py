"""Implement the command ``trak``, which runs the Snakemake workflow from any folder."""
