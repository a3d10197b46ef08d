"""Embed training samples and all possible targets under one checkpoint."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_embeddings import compute_embeddings

    compute_embeddings(
        embeddings_file=Path(snakemake.output.embeddings),
        checkpoint=Path(snakemake.input.checkpoint),
        study=Path(snakemake.params.study),
        spec=snakemake.params.spec,
        code=snakemake.params.code,
        device=snakemake.resources.device,
        batch_size=snakemake.resources.batch_size,
        threads=snakemake.threads,
    )
