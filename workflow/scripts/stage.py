"""Run a job: its param `code` names the stage, which takes what its rule names, by these names."""

from trak_core.system.fork_client import done_by_fork
from trak_core.system.job import (
    describe_job,
    imports_of_job,
    run_logged,
    run_to_the_end,
    stop_cleanly,
)

stop_cleanly()
job = describe_job(snakemake)
if not done_by_fork("trak_core.system.job:run_logged", job, imports_of_job(job)):
    run_to_the_end(lambda: run_logged(job))
