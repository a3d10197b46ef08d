# What decides the numbers: `compute` and `compare` rerun nothing here.
reported_config = ordered(
    {k: value for k, value in config.items() if k not in ("compute", "compare")}
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
        distortion=expand(
            "<results>/distortion/{checkpoint}.h5", checkpoint=diagnosed
        ),
        evaluations=expand("<results>/evaluation/{experiment}.h5", experiment=measured),
        removals=expand(
            "<results>/removals/{experiment}.h5",
            experiment=(
                [evaluation["removals"]["experiment"]]
                if "removals" in evaluation
                else []
            ),
        ),
        flipped=(
            ["<results>/flipped.h5"] if "flipped" in evaluation else []
        ),
        self_influence=(
            ["<results>/self_influence.h5"] if evaluation.get("self_influence") else []
        ),
        # Not read: the report is the last to run, so that every stage's time is in it.
        figures=expand("<results>/figures/{experiment}.png", experiment=experiments),
    output:
        report=report(
            "<results>/report.html",
            caption="../report/report.rst",
            category="Report",
            labels={"page": "report.html"},
        ),
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
        code=code_digest("trak_core.stages.write_report"),
        digest=study,
        study=config["study"],
        config=reported_config,
    message:
        "Writing the report"
    script:
        "../scripts/write_report.py"
