"""Run the stage that a job's param `code` names, with the rule's named values as arguments."""

from trak_core.runtime.job import run_script

run_script(snakemake)
