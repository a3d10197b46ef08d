"""Run the stage in a job's param `code`, with the rule's named values as keyword arguments."""

from trak_core.runtime.job import run_script

run_script(snakemake)
