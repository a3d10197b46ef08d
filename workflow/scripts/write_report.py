"""Write the report of the study."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.write_report import write_report

    write_report(
        report=Path(snakemake.output.report),
        scores=[Path(p) for p in snakemake.input.scores],
        normal_matrices=[Path(p) for p in snakemake.input.normal_matrices],
        distortion=[Path(p) for p in snakemake.input.distortion],
        evaluations=[Path(p) for p in snakemake.input.evaluations],
        removals=[Path(p) for p in snakemake.input.removals],
        flipped=[Path(p) for p in snakemake.input.flipped],
        self_influence=[Path(p) for p in snakemake.input.self_influence],
        study=Path(snakemake.params.study),
        config=snakemake.params.config,
    )
