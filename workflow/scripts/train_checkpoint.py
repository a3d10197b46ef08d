"""Train one checkpoint with the study's own training function."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.train_checkpoint import train_checkpoint

    train_checkpoint(
        checkpoint=Path(snakemake.output.checkpoint),
        study=Path(snakemake.params.study),
        arguments=snakemake.params.arguments,
        threads=snakemake.threads,
        flipped=snakemake.params.get("flipped"),
    )
