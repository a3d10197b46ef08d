"""Retrain on some random halves of the training data."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.retrain_subsets import retrain_subsets

    retrain_subsets(
        retrained=Path(snakemake.output.retrained),
        study=Path(snakemake.params.study),
        first=int(snakemake.wildcards.first),
        last=int(snakemake.wildcards.last),
        code=snakemake.params.code,
        batch_size=snakemake.resources.batch_size,
        threads=snakemake.threads,
        **snakemake.params.settings,
    )
