"""Look for flipped labels by self-influence."""

from pathlib import Path

from trak_core.system.job import logged_to

with logged_to(snakemake.log[0]):
    from trak_core.stages.find_flipped import find_flipped

    find_flipped(
        flipped=Path(snakemake.output.flipped),
        features=[Path(p) for p in snakemake.input.features],
        normal_matrices=[Path(p) for p in snakemake.input.normal_matrices],
        original=Path(snakemake.input.original),
        expected=snakemake.params.expected,
        settings=snakemake.params.settings,
        code=snakemake.params.code,
        memory_mb=snakemake.resources.memory_mb,
    )
