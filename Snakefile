# Makes `snakemake`, if called in this folder, run the workflow.
include: "workflow/Snakefile"


# `include` does not take over the default target, so it is set here.
use rule all as default
