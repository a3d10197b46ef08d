rule train_checkpoint:
    output:
        checkpoint="<results>/checkpoints/{checkpoint}.pt",
    log:
        "<results>/logs/train_checkpoint/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/train_checkpoint/{checkpoint}.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.train_checkpoint"),
        digest=study,
        study=config["study"],
        arguments=training_arguments,
    message:
        "Training checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/train_checkpoint.py"
