# What all jobs have in common: an environment, memory, and a script that runs the stage in the param
# `code`. Logs and benchmarks stand in each rule: with a store, Snakemake fills in no rule's pathvars.
# On Kubernetes 0 would be a request too.
gpu = 1 if compute["device"] == "cuda" else None
# A path of a conda environment's file would count from this folder, a name is one of an environment.
environment = compute.get("conda", "../envs/trak.yaml")
if "conda" in compute and environment.endswith((".yaml", ".yml")):
    environment = str(Path(environment).absolute())
# The priority of rules that make scores and figures: they run before trainings that only measure.
scores_first = 10


def code_of(stage):
    """The stage, by which its job is run, and a hash of the code that it may run."""
    return f"{stage} {stage_digest(stage_module(stage))}"


def job_mb(wildcards, attempt):
    # Interpreter, torch and a study's own data come on top of the arrays.
    return attempt * (compute["memory_mb"] + 1500)


def model_job_mb(wildcards, attempt):
    # And the weights of a large model: a job of several checkpoints has one at a time.
    asked = getattr(wildcards, "checkpoint", None)
    weights = largest_weights_mb(specs, results, asked)
    return job_mb(wildcards, attempt) + attempt * weights


rule stage:
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
