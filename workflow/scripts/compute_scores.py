"""Compare the training samples with the targets of one experiment under one checkpoint."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compute_scores import compute_scores

    compute_scores(
        scores=Path(snakemake.output.scores),
        train=Path(snakemake.input.train),
        targets=Path(snakemake.input.targets),
        normal_matrix=Path(snakemake.input.normal_matrix),
        expected=snakemake.params.expected,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
        **snakemake.params.settings,
    )
