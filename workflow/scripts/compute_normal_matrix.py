"""Sum the normal matrix of one checkpoint."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_normal_matrix import compute_normal_matrix

    compute_normal_matrix(
        normal_matrix_file=Path(snakemake.output.normal_matrix),
        features=Path(snakemake.input.features),
        expected=snakemake.params.expected,
        weighting=snakemake.params.weighting,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
    )
