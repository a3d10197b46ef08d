"""Run the stage that the param `code` of a job names, with the rule's named values as arguments."""

from trak_core.runtime.job import run_script

run_script(snakemake)
