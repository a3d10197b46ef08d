"""Compare the scores of two runs."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.compare_runs import compare_runs

    pairs = zip(snakemake.input.ours, snakemake.input.theirs, strict=True)
    runs = [(Path(ours), Path(theirs)) for ours, theirs in pairs]
    compare_runs(
        comparison=Path(snakemake.output.comparison),
        runs=dict(zip(snakemake.params.settings["experiments"], runs, strict=True)),
        top=snakemake.params.settings["top"],
        code=snakemake.params.code,
    )
