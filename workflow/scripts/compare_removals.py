"""Compare models without some training samples with those that saw everything."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compare_removals import compare_removals

    compare_removals(
        removals=Path(snakemake.output.removals),
        scores=Path(snakemake.input.scores),
        random=Path(snakemake.input.random),
        top=[Path(p) for p in snakemake.input.top],
        code=snakemake.params.code,
        **snakemake.params.settings,
    )
