"""Run a job by calling its stage, the function of trak_core that the param `code` names."""

from trak_core.runtime.job import run_script

run_script(snakemake)
