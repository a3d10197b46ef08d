"""Compute the self-influence of every training sample."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_self_influence import compute_self_influence

    compute_self_influence(
        self_influence=Path(snakemake.output.self_influence),
        features=[Path(p) for p in snakemake.input.features],
        normal_matrices=[Path(p) for p in snakemake.input.normal_matrices],
        expected=snakemake.params.expected,
        settings=snakemake.params.settings,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
    )
