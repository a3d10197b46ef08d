"""Multiply the gradients of the training samples with those of one split under one checkpoint."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_gramian import compute_gramian

    compute_gramian(
        gramian=Path(snakemake.output.gramian),
        checkpoint=Path(snakemake.input.checkpoint),
        study=Path(snakemake.params.study),
        split=snakemake.wildcards.split,
        spec=snakemake.params.spec,
        code=snakemake.params.code,
        device=snakemake.resources.device,
        batch_size=snakemake.resources.batch_size,
        memory_mb=snakemake.resources.memory_mb,
        threads=snakemake.threads,
    )
