# What decides the numbers; the keys under `compute` rerun nothing, so that they aren't in it.
reported_config = ordered(
    {key: value for key, value in config.items() if key != "compute"}
)


rule write_report:
    input:
        scores=expand("<results>/scores/{experiment}.h5", experiment=experiments),
        normal_matrices=(
            []
            if exact
            else expand(
                "<results>/normal_matrix/{checkpoint}.h5", checkpoint=checkpoints
            )
        ),
        # Not read: the report is the last to run, so that every stage's time is in it.
        figures=expand("<results>/figures/{experiment}.png", experiment=experiments),
    output:
        report="<results>/report.html",
    log:
        "<results>/logs/write_report.log",
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.report"),
        digest=study,
        study=config["study"],
        config=reported_config,
    message:
        "Writing the report"
    script:
        "../scripts/write_report.py"
