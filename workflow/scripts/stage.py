"""The door of every job: its param `code` says the stage, and what it names is what that takes."""

from trak_core.system.door import asked_of, run
from trak_core.system.forked import done_by_fork
from trak_core.system.job import logged_to

asked = asked_of(snakemake)
if not done_by_fork(asked):
    with logged_to(asked["log"]):
        run(asked)
