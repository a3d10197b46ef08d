# With this file, `snakemake` in this folder runs the workflow.
include: "workflow/Snakefile"


# `include` does not set the default target, so it is set here.
use rule all as default
