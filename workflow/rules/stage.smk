# What all jobs have in common: an environment, memory, and a script that runs the stage in the param
# `code`. Logs and benchmarks stand in each rule: with a store, Snakemake fills in no rule's pathvars.
rule stage:
    log:
        "<results>/logs/stage.log",
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
    script:
        "../scripts/stage.py"


# One that runs the model.
use rule stage as model_stage with:
    threads: compute["threads"]
    resources:
        gpu=gpu,
        mem_mb=model_job_mb,
        device=compute["device"],
        batch_size=compute["batch_size"],
        memory_mb=compute["memory_mb"],
