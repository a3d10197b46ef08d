from snakemake.utils import min_version

min_version("9.19.0")


# A config named on the command line replaces the default study; two studies are never mixed.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/specs.smk"
include: "workflow/rules/checkpoints.smk"


if specs.is_exact:

    include: "workflow/rules/gramian.smk"

else:

    include: "workflow/rules/features.smk"


include: "workflow/rules/scores.smk"


if specs.evaluation:

    include: "workflow/rules/evaluation.smk"


if "flipped" in specs.evaluation:

    include: "workflow/rules/flipped.smk"


if "removals" in specs.evaluation:

    include: "workflow/rules/removals.smk"


if "distortion" in config:

    include: "workflow/rules/distortion.smk"


include: "workflow/rules/report.smk"


localrules:
    all,
    scores,


rule all:
    default_target: True
    input:
        expand("<results>/scores/{experiment}.h5", experiment=specs.experiments),
        expand("<results>/figures/{experiment}.png", experiment=specs.experiments),
        distortion_files,
        evaluation_files,
        removals_files,
        flipped_files,
        self_influence_files,
        "<results>/report.html",


rule scores:
    input:
        expand("<results>/scores/{experiment}.h5", experiment=specs.experiments),
