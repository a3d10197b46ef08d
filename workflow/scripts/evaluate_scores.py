"""Measure the scores of one experiment against retrained models."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.evaluate_scores import evaluate_scores

    features = zip(
        snakemake.input.train, snakemake.input.targets, snakemake.input.normal_matrices, strict=True
    )
    evaluate_scores(
        evaluation=Path(snakemake.output.evaluation),
        scores=Path(snakemake.input.scores),
        checkpoint_scores=[Path(p) for p in snakemake.input.checkpoint_scores],
        retrained=[Path(p) for p in snakemake.input.retrained],
        features=[(Path(a), Path(b), Path(c)) for a, b, c in features],
        embeddings=[Path(p) for p in snakemake.input.embeddings],
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
        **snakemake.params.expected,
        **snakemake.params.settings,
    )
