"""Start the workflow from any folder: ``trak run study.yaml``. Snakemake stays the engine."""
