# Which targets a description matches is known before their features are computed.
rule compute_outputs:
    input:
        checkpoint=checkpoint_input,
    output:
        outputs="<results>/outputs/{checkpoint}.h5",
    log:
        "<results>/logs/compute_outputs/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_outputs/{checkpoint}.tsv"
    priority: scores_first
    conda:
        environment
    threads: compute["threads"]
    resources:
        gpu=gpu,
        mem_mb=model_job_mb,
        device=compute["device"],
        batch_size=compute["batch_size"],
        memory_mb=compute["memory_mb"],
    params:
        code=code_of("compute_outputs"),
        signature=checkpoint_signature,
        spec=lambda wildcards: specs.outputs.under(wildcards.checkpoint).as_dict(),
        study_file=config["study"],
    message:
        "Asking checkpoint {wildcards.checkpoint} about all targets"
    script:
        "../scripts/stage.py"


rule select_targets:
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
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("select_targets"),
        spec=specs.outputs.as_dict(),
        where=lambda wildcards: specs.conditions[wildcards.experiment],
        targets_digest=lambda wildcards: specs.targets_digest(wildcards.experiment),
        digest=specs.digests["columns"] if specs.has_columns else None,
        study_file=config["study"] if specs.has_columns else None,
    message:
        "Selecting the targets of experiment {wildcards.experiment}: {output.targets}"
    script:
        "../scripts/stage.py"


timed("compute_outputs/{c}", c=specs.self_influence.ends)
timed("select_targets/{e}", e=specs.conditions)
