"""Run a job: its param `code` names the stage, which takes what its rule names, by these names."""

from trak_core.system.job import run_script

run_script(snakemake)
