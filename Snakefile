# So that `snakemake` in this folder runs the workflow.
include: "workflow/Snakefile"


# Its default target too, which `include` leaves to the file that includes.
use rule all as default
