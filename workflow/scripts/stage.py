"""Run a job: its param `code` names the stage, and what its rule names is what that takes."""

from trak_core.system.dispatch import asked_of, run_logged
from trak_core.system.fork_server import done_by_fork
from trak_core.system.job import stop_cleanly

stop_cleanly()
asked = asked_of(snakemake)
if not done_by_fork("trak_core.system.dispatch:run_logged", asked):
    run_logged(asked)
