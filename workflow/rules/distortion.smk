rule compute_distortion:
    input:
        checkpoint=checkpoint_input,
    output:
        distortion="<results>/distortion/{checkpoint}.h5",
    log:
        "<results>/logs/compute_distortion/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_distortion/{checkpoint}.tsv"
    conda:
        environment
    threads: compute["threads"]
    resources:
        gpu=gpu,
        mem_mb=model_job_mb,
        device=compute["device"],
        batch_size=compute["batch_size"],
        memory_mb=compute["memory_mb"],
    params:
        code=code_of("compute_distortion"),
        signature=checkpoint_signature,
        spec=distortion_spec,
        study_file=config["study"],
    message:
        "Comparing projected gradients with whole ones under checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/stage.py"


timed("compute_distortion/{c}", c=specs.self_influence.ends)
