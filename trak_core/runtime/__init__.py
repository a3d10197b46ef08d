"""Run a job of a Snakemake rule: call the rule's function, write its files, and log progress."""
