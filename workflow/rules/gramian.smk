use rule model_stage as compute_gramian with:
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
    params:
        code=code_of("compute_gramian"),
        signature=checkpoint_signature,
        spec=features_spec,
        targets=split_targets,
        question=split_question,
        study_file=config["study"],
    message:
        "Multiplying gradients of {wildcards.split} under checkpoint {wildcards.checkpoint}"


use rule stage as compute_exact_scores with:
    input:
        train_path="<results>/gramian/{checkpoint}/train.h5",
        targets_path="<results>/gramian/{checkpoint}/{experiment}.h5",
    output:
        scores="<results>/scores/{experiment}/{checkpoint}.h5",
    log:
        "<results>/logs/compute_exact_scores/{experiment}/{checkpoint}.log",
    benchmark:
        "<results>/benchmarks/compute_exact_scores/{experiment}/{checkpoint}.tsv"
    priority: scores_first
    params:
        code=code_of("compute_exact_scores"),
        spec=checkpoint_scores_spec,
    message:
        "Scoring experiment {wildcards.experiment} exactly under checkpoint {wildcards.checkpoint}"
