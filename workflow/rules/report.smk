rule write_report:
    input:
        # Without a name: the report is the last to run, so that every stage's time is in it.
        expand("<results>/figures/{experiment}.png", experiment=specs.experiments),
        timings if stored else [],
        scores=expand("<results>/scores/{experiment}.h5", experiment=specs.experiments),
        normal_matrices=(
            [] if specs.is_exact else of_checkpoints("normal_matrix/{c}.h5")
        ),
        distortion=distortion_files,
        evaluations=evaluation_files,
        removals=removals_files,
        flipped=flipped_files,
        self_influence=self_influence_files,
    output:
        report="<results>/report.html",
    log:
        "<results>/logs/write_report.log",
    conda:
        environment
    threads: 1
    resources:
        mem_mb=job_mb,
    params:
        code=code_of("write_report"),
        digest=specs.study_digest,
        study_file=config["study"],
        config=specs.reported,
    message:
        "Writing the report"
    script:
        "../scripts/stage.py"
