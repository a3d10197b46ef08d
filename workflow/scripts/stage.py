"""The door of every job: its param `code` says the stage, and what it names is what that takes."""

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.system.door import run

    run(snakemake)
