"""Project the per-sample gradients of one split, or one shard of it, under one checkpoint."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_features import compute_features

    compute_features(
        features=Path(snakemake.output.features),
        checkpoint=Path(snakemake.input.checkpoint),
        study=Path(snakemake.params.study),
        split=snakemake.wildcards.get("split", "train"),
        shard=int(snakemake.wildcards.get("shard", 1)),
        n_shards=int(snakemake.wildcards.get("n_shards", 1)),
        spec=snakemake.params.spec,
        code=snakemake.params.code,
        device=snakemake.resources.device,
        batch_size=snakemake.resources.batch_size,
        memory_mb=snakemake.resources.memory_mb,
        threads=snakemake.threads,
    )
