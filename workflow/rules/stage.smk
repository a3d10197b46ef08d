# All jobs share an environment, a memory limit, and a script, which runs the function named in the
# param `code`. Each rule sets its own log and benchmark, because Snakemake does not replace <results>
# in inherited ones if files are in a store.
rule stage:
    log:
        "<results>/logs/stage.log",
    conda:
        environment
    # Scores need one thread: with more, OpenBLAS's Cholesky factorization crashes for matrices with
    # 16,384 or more rows.
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
