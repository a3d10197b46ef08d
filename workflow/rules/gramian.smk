rule compute_gramian:
    input:
        checkpoint=checkpoint_input,
        selected=selected_targets,
    output:
        gramian="<results>/gramian/{checkpoint}/{split}.h5",
    log:
        "<results>/logs/compute_gramian/{checkpoint}/{split}.log",
    benchmark:
        "<results>/benchmarks/compute_gramian/{checkpoint}/{split}.tsv"
    priority: scores_first
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
        code=code_of("compute_gramian"),
        signature=checkpoint_signature,
        spec=features_spec,
        targets=split_targets,
        question=split_question,
        study_file=config["study"],
    message:
        "Multiplying gradients of {wildcards.split} under checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/stage.py"


rule compute_exact_scores:
    input:
        train_path="<results>/gramian/{checkpoint}/train.h5",
        targets_path="<results>/gramian/{checkpoint}/{experiment}.h5",
    output:
        scores="<results>/scores/{experiment}/{checkpoint}.h5",
    log:
        "<results>/logs/compute_exact_scores/{experiment}/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_exact_scores/{experiment}/{checkpoint}.tsv"
    wildcard_constraints:
        experiment=any_of(specs.experiments),
    priority: scores_first
    conda:
        environment
    # More would crash OpenBLAS's Cholesky factorization from 16,384 samples on.
    threads: 1
    resources:
        mem_mb=job_mb,
        memory_mb=compute["memory_mb"],
    params:
        code=code_of("compute_exact_scores"),
        spec=checkpoint_scores_spec,
    message:
        "Scoring experiment {wildcards.experiment} exactly under checkpoint {wildcards.checkpoint}"
    script:
        "../scripts/stage.py"


timed("compute_gramian/{c}/{split}", c=specs.checkpoints, split=specs.shards)
timed("compute_exact_scores/{e}/{c}", e=specs.experiments, c=specs.checkpoints)
