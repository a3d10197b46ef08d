# All jobs share an environment, a memory limit, and a script, which runs the function named in the
# param `code`. Each rule sets its own log and benchmark, because with a store, Snakemake does not
# fill in pathvars in inherited ones.
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


# The base of rules whose jobs run the model.
use rule stage as model_stage with:
    threads: compute["threads"]
    resources:
        gpu=gpu,
        mem_mb=model_job_mb,
        device=compute["device"],
        batch_size=compute["batch_size"],
        memory_mb=compute["memory_mb"],
