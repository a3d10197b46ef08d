from snakemake.utils import min_version

min_version("9.19.0")


# A config named on the command line replaces the default study; two studies are never mixed.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


report: "workflow/report/study.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/study.smk"
include: "workflow/rules/jobs.smk"
include: "workflow/rules/checkpoints.smk"


if exact:

    include: "workflow/rules/gramian.smk"

else:

    include: "workflow/rules/features.smk"


include: "workflow/rules/scores.smk"
include: "workflow/rules/evaluation_jobs.smk"


if evaluation:

    include: "workflow/rules/evaluation.smk"


if "flipped" in evaluation:

    include: "workflow/rules/flipped.smk"


if "removals" in evaluation:

    include: "workflow/rules/removals.smk"


if "compare" in config:

    include: "workflow/rules/compare.smk"


if "distortion" in config:

    include: "workflow/rules/distortion.smk"


include: "workflow/rules/report.smk"


localrules:
    all,
    scores,
    compare,


rule all:
    default_target: True
    input:
        expand("<results>/scores/{experiment}.h5", experiment=experiments),
        expand("<results>/figures/{experiment}.png", experiment=experiments),
        expand("<results>/distortion/{checkpoint}.h5", checkpoint=diagnosed),
        evaluation_files(),
        "<results>/report.html",


rule scores:
    input:
        expand("<results>/scores/{experiment}.h5", experiment=experiments),


rule compare:
    input:
        "<results>/comparison.h5",
