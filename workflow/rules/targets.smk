# Select the targets of `where` conditions before their features are computed.
use rule model_stage as compute_outputs with:
    input:
        checkpoint=checkpoint_input,
    output:
        outputs="<results>/outputs/{checkpoint}.h5",
    log:
        "<results>/logs/compute_outputs/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_outputs/{checkpoint}.tsv"
    priority: scores_first
    params:
        code=code_of("compute_outputs"),
        signature=checkpoint_signature,
        spec=lambda w: specs.outputs.under(w.checkpoint).as_dict(),
        study_file=config["study"],
    message:
        "Computing outputs of all targets under checkpoint {wildcards.checkpoint}"


use rule stage as select_targets with:
    input:
        outputs=of_ends("outputs/{c}.h5"),
    output:
        targets="<results>/targets/{experiment}.h5",
    log:
        "<results>/logs/select_targets/{experiment}.log",
    benchmark:
        "<results>/benchmarks/select_targets/{experiment}.tsv"
    wildcard_constraints:
        experiment=any_of(specs.conditions),
    priority: scores_first
    params:
        code=code_of("select_targets"),
        spec=specs.outputs.as_dict(),
        where=lambda w: specs.conditions[w.experiment],
        targets_digest=lambda w: specs.targets_digest(w.experiment),
        study_file=config["study"] if specs.has_columns else None,
    message:
        "Selecting the targets of experiment {wildcards.experiment}: {output.targets}"
