"""Compare projected norms and inner products of some training samples with the exact ones."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_distortion import compute_distortion

    compute_distortion(
        distortion=Path(snakemake.output.distortion),
        checkpoint=Path(snakemake.input.checkpoint),
        study=Path(snakemake.params.study),
        spec=snakemake.params.spec,
        code=snakemake.params.code,
        device=snakemake.resources.device,
        batch_size=snakemake.resources.batch_size,
        memory_mb=snakemake.resources.memory_mb,
        threads=snakemake.threads,
    )
