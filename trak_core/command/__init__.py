"""Implement the command ``trak``, which runs the Snakemake workflow in any folder."""
