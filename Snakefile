# So that `snakemake` in this folder runs the workflow. An included rule is never the default target.
include: "workflow/Snakefile"


workflow.default_target = "all"
