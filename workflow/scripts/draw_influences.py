"""Draw targets beside the training samples that moved them."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.draw_influences import draw_influences

    draw_influences(
        figure=Path(snakemake.output.figure),
        scores=Path(snakemake.input.scores),
        study=Path(snakemake.params.study),
    )
