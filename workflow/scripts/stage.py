"""The door of every job: its param `code` says the stage, and what it names is what that takes."""

from trak_core.system.forked import done_by_fork

if not done_by_fork(snakemake):
    from trak_core.system.door import run
    from trak_core.system.job import logged_to

    with logged_to(snakemake.log[0]):
        run(snakemake)
