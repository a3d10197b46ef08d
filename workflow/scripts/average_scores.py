"""Average the checkpoints of one experiment."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.average_scores import average_scores

    average_scores(
        scores=Path(snakemake.output.scores),
        checkpoint_scores=[Path(p) for p in snakemake.input.checkpoint_scores],
        features=[Path(p) for p in snakemake.input.features],
        expected=snakemake.params.expected,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
        **snakemake.params.settings,
    )
