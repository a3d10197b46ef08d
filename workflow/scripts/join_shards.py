"""Join the shards of a split into its features."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.join_shards import join_shards

    join_shards(
        features=Path(snakemake.output.features),
        shards=[Path(shard) for shard in snakemake.input.shards],
        code=snakemake.params.code,
    )
