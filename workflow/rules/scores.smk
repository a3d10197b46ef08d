rule average_scores:
    input:
        checkpoint_scores=checkpoint_scores,
        features=streamed_features,
    output:
        scores="<results>/scores/{experiment}.h5",
    log:
        "<results>/logs/average_scores/{experiment}.log",
    benchmark:
        "<results>/benchmarks/average_scores/{experiment}.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.average_scores"),
        expected=expected_scores,
        settings=ordered(
            {
                "combine": scoring["combine"],
                "loss_weight_power": scoring["loss_weight_power"],
                "top": scoring["top"],
            }
        ),
    message:
        "Averaging the checkpoints of experiment {wildcards.experiment}"
    script:
        "../scripts/average_scores.py"


rule draw_influences:
    input:
        scores="<results>/scores/{experiment}.h5",
    output:
        figure=report(
            "<results>/figures/{experiment}.png",
            caption="../report/influences.rst",
            category="Influences",
            labels={"experiment": "{experiment}"},
        ),
    log:
        "<results>/logs/draw_influences/{experiment}.log",
    benchmark:
        "<results>/benchmarks/draw_influences/{experiment}.tsv"
    conda:
        "../envs/trak.yaml"
    threads: 1
    resources:
        gpu=0,
        mem_mb=job_mb,
        runtime=job_minutes,
    params:
        code=code_digest("trak_core.stages.draw_influences"),
        digest=study,
        study=config["study"],
    message:
        "Drawing the influences on experiment {wildcards.experiment}"
    script:
        "../scripts/draw_influences.py"
