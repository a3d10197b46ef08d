# All jobs share an environment, a memory limit, and a script that runs the stage in the param `code`.
# Each rule sets its log and benchmark, because with a store Snakemake does not fill in pathvars here.
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


# A job that runs the model.
use rule stage as model_stage with:
    threads: compute["threads"]
    resources:
        gpu=gpu,
        mem_mb=model_job_mb,
        device=compute["device"],
        batch_size=compute["batch_size"],
        memory_mb=compute["memory_mb"],
