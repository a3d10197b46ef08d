# So that `snakemake` in this folder runs the workflow, its default target too, which `include:` drops.
workflow.include("workflow/Snakefile", overwrite_default_target=True)
