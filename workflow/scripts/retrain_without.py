"""Retrain without some training samples: a target's most helpful ones, or random ones."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.retrain_without import retrain_without

    scores = snakemake.input.get("scores")
    retrain_without(
        retrained=Path(snakemake.output.retrained),
        study=Path(snakemake.params.study),
        scores=None if scores is None else Path(scores),
        code=snakemake.params.code,
        batch_size=snakemake.resources.batch_size,
        threads=snakemake.threads,
        **snakemake.params.settings,
    )
