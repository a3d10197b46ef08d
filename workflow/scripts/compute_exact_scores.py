"""Score the targets of one experiment under one checkpoint, without a projection."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_exact_scores import compute_exact_scores

    compute_exact_scores(
        scores=Path(snakemake.output.scores),
        train=Path(snakemake.input.train),
        targets=Path(snakemake.input.targets),
        expected=snakemake.params.expected,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
        **snakemake.params.settings,
    )
