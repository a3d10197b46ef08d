def checkpoint_path(wildcards):
    if "training" in config:
        return f"{config['results']}/checkpoints/{wildcards.checkpoint}.pt"
    return checkpoints[wildcards.checkpoint]


if "training" in config:
    checkpoint_input = checkpoint_path
else:
    # A user's own file counts by its size and time, in a param: Snakemake alone would miss one
    # that was replaced by an older file, or changed inside a folder.
    checkpoint_input = ancient(checkpoint_path)
    if workflow.is_main_process:
        gone = [path for path in checkpoints.values() if not Path(path).exists()]
        if gone:
            raise WorkflowError(
                f"Checkpoints must exist. Found nothing at: {', '.join(gone)} "
                f"(from {os.getcwd()})."
            )


def checkpoint_signature(wildcards):
    path = Path(checkpoint_path(wildcards))
    return None if "training" in config else stat_signature(path)


def training_arguments(wildcards):
    return ordered(config["training"] | checkpoints[wildcards.checkpoint])


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
        mem_mb=memory_mb,
        runtime=compute["runtime_minutes"],
    params:
        code=code_digest("trak_core.stages.train"),
        study=study,
        arguments=training_arguments,
    message:
        "Training checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/train_checkpoint.py"
