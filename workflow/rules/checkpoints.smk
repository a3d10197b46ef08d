rule train_checkpoint:
    output:
        checkpoint="<results>/checkpoints/{checkpoint}.pt",
    log:
        "<results>/logs/train_checkpoint/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/train_checkpoint/{checkpoint}.tsv"
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("train_checkpoint"),
        digest=specs.study_digest,
        study_file=config["study"],
        arguments=lambda wildcards: specs.training_arguments(wildcards.checkpoint),
    message:
        "Training checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/stage.py"


if trained:
    timed("train_checkpoint/{c}", c=specs.checkpoints)
